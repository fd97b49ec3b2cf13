"""kv caches in plain loops: rows written and read by slot, packed or in bf16."""

import torch
from torch import Tensor

from flashdsa.reference.packed_kv import fields, is_packed, quantize_kv, unpack_kv
from flashdsa.reference.quant import f64

__all__ = ["read_kv_cache", "write_kv_cache"]


def write_kv_cache(
    kv: Tensor, slots: Tensor, cache: Tensor, scale: str, form: str = "v32"
) -> Tensor:
    """A copy of the cache, without gaps, in which slot `page * page_size + offset` has the row; -1
    skips it.

    kv `[T, d]`; cache `[S_kv, width]` or `[num_pages, page_size, width]`, with or without a 1
    before the width. `form` names packed rows.
    """
    written = cache.detach().cpu().clone(memory_format=torch.contiguous_format)
    kept = slots.cpu() >= 0
    rows, places = kv.detach().cpu()[kept], slots.cpu()[kept].long()
    if not is_packed(cache):
        written.view(-1, written.shape[-1])[places] = rows.to(cache.dtype)
        return written
    packed = quantize_kv(rows, scale, form).view(-1)
    page_size = 1 if cache.dim() == 2 else cache.shape[1]
    from_fields = fields(form, 1, torch.arange(len(rows)))
    for source, place in zip(from_fields, fields(form, page_size, places), strict=True):
        written.view(-1).view(torch.uint8)[place] = packed[source]
    return written


def read_kv_cache(cache: Tensor, slots: Tensor, form: str = "v32") -> Tensor:
    """Rows `[T, d]` in float64; `form` names packed rows."""
    if is_packed(cache):
        return unpack_kv(cache, form, slots)
    return f64(cache.reshape(-1, cache.shape[-1])[slots.long()])
