"""kv caches in plain loops: rows written and read by slot, packed or in bf16."""

import torch
from torch import Tensor

from flashdsa.reference.packed_kv import is_packed, quantize_kv, unpack_kv


def write_kv_cache(kv: Tensor, slots: Tensor, cache: Tensor, scale: str) -> Tensor:
    """A copy of the cache in which slot `page * page_size + offset` has the row; -1 skips it.

    kv `[T, 576]`; cache `[..., d]`, all leading dimensions together counting slots.
    """
    written = cache.detach().cpu().clone(memory_format=torch.contiguous_format)
    flat = written.view(-1, written.shape[-1])
    rows = kv.detach().cpu()
    rows = quantize_kv(rows, scale).view(cache.dtype) if is_packed(cache) else rows.to(cache.dtype)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot >= 0:
            flat[slot] = row
    return written


def read_kv_cache(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows `[T, 576]` in float64."""
    flat = cache.detach().cpu().reshape(-1, cache.shape[-1])
    rows = flat[slots.cpu().long()]
    return unpack_kv(rows) if is_packed(cache) else rows.double()
