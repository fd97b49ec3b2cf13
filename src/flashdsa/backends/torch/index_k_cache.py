"""The packed index-K cache by torch on any device. Slots outside it are skipped, and read as 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.backends.cpu.index_k_cache import check_slots, page_views, read_slots
from flashdsa.backends.cpu.quantize import quantize
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.mxfp4 import has_mxfp4, pack_keys, parts_of_cache
from flashdsa.backends.packed_rows import put

if TYPE_CHECKING:
    from flashdsa.ops.index_k_cache import CacheReadOperands, CacheWriteOperands


def write(operands: CacheWriteOperands) -> None:
    """Quantise `k` (T, 128) and write token t into slot `slots[t]` = page * 64 + offset; of equal
    slots any one's token stays."""
    k, slots, cache = operands
    if values_are_checked():
        check_slots(slots[slots != -1], cache, distinct=True)
    if not len(slots) or not len(cache):
        return
    if has_mxfp4(cache):
        put(parts_of_cache(cache), slots, pack_keys(k))
        return
    fp8, scale = quantize(k)
    keys, scales = page_views(cache)
    parts = [keys, scales.unsqueeze(2).view(torch.uint8)]
    rows = torch.cat((fp8.view(torch.uint8), scale.unsqueeze(1).view(torch.uint8)), dim=1)
    put(parts, slots, rows)


def read(operands: CacheReadOperands) -> tuple[Tensor, Tensor]:
    """The stored keys (T, 128) e4m3 and scales (T,) fp32 of `slots` (T,)."""
    if values_are_checked():
        check_slots(operands.slots, operands.cache, distinct=False)
    return read_slots(*operands)
