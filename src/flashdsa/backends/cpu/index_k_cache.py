"""The packed index-K cache by torch: page bytes as views, writing and reading by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.backends.cpu.quantize import quantize
from flashdsa.backends.cpu.tiling import CPU, Mode
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.mxfp4 import as_e4m3, has_mxfp4, pack_keys, parts_of_cache
from flashdsa.backends.packed_rows import put
from flashdsa.errors import ArgumentValueError
from flashdsa.problem import INDEX_HEAD_DIM, PAGE_KEY_BYTES, PAGE_SIZE

if TYPE_CHECKING:
    from flashdsa.ops.index_k_cache import CacheReadOperands, CacheWriteOperands


def page_views(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the cache's keys (num_pages, 64, 128) uint8 and scales (num_pages, 64) fp32.

    A page is 64 x 128 e4m3 bytes, token-major, then 64 fp32 scales.
    """
    pages = cache.view(torch.uint8).flatten(1)
    keys = pages[:, :PAGE_KEY_BYTES].unflatten(1, (PAGE_SIZE, INDEX_HEAD_DIM))
    scales = pages[:, PAGE_KEY_BYTES:].view(torch.float32)
    return keys, scales


def write(operands: CacheWriteOperands, *, power_of_two: bool, mode: Mode = CPU) -> None:
    """Quantise `k` (T, 128) and write token t into slot `slots[t]` = page * 64 + offset.

    Slots of -1 are padding and are skipped, as are those outside the cache if values are not read;
    a slot named twice gets bytes of any of its tokens then.

    Raises:
        ArgumentValueError: a slot outside the cache, or named twice, where values are read; nothing
            is written then.
    """
    k, slots, cache = operands
    if mode.reads or values_are_checked():
        check_slots(slots[slots != -1], cache, distinct=True)
    if len(slots) and len(cache):
        put_keys(k, slots, cache, power_of_two=power_of_two)


def put_keys(k: Tensor, slots: Tensor, cache: Tensor, *, power_of_two: bool) -> None:
    """Do what `write` does, without a check, for at least one key and one page."""
    if has_mxfp4(cache):
        put(parts_of_cache(cache), slots, pack_keys(k))
        return
    fp8, scale = quantize(k, power_of_two=power_of_two)
    keys, scales = page_views(cache)
    parts = [keys, scales.unsqueeze(2).view(torch.uint8)]
    put(parts, slots, torch.cat((fp8.view(torch.uint8), scale[:, None].view(torch.uint8)), dim=1))


def read(operands: CacheReadOperands, *, mode: Mode = CPU) -> tuple[Tensor, Tensor]:
    """The stored keys (T, 128) e4m3 and scales (T,) fp32 of `slots` (T,).

    Raises:
        ArgumentValueError: a slot outside the cache, where values are read; else it reads as 0.
    """
    cache, slots = operands
    if mode.reads or values_are_checked():
        check_slots(slots, cache, distinct=False)
    return read_slots(cache, slots)


def read_slots(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The result of `read`, without a check."""
    num_slots = cache.shape[0] * PAGE_SIZE
    inside = (slots >= 0) & (slots < num_slots)
    if num_slots == 0:
        fp8 = torch.zeros(len(slots), INDEX_HEAD_DIM, dtype=torch.uint8, device=cache.device)
        return fp8.view(torch.float8_e4m3fn), inside.float()
    used = torch.where(inside, slots, 0).long()
    page, offset = used // PAGE_SIZE, used % PAGE_SIZE
    if has_mxfp4(cache):
        rows = torch.cat([part[page, offset] for part in parts_of_cache(cache)], dim=1)
        fp8, scale = as_e4m3(rows.masked_fill_(~inside[:, None], 0))
        return fp8, scale.masked_fill_(~inside, 0)
    keys, scales = page_views(cache)
    fp8 = keys[page, offset].masked_fill_(~inside[:, None], 0)
    return fp8.view(torch.float8_e4m3fn), scales[page, offset].masked_fill_(~inside, 0)


def check_slots(slots: Tensor, cache: Tensor, *, distinct: bool) -> None:
    """Raise ArgumentValueError for a slot outside the cache or, if `distinct`, named twice."""
    num_slots = cache.shape[0] * PAGE_SIZE
    outside = (slots < 0) | (slots >= num_slots)
    if outside.any():
        raise ArgumentValueError(
            f"slots: expected slots in [0, {num_slots}), {cache.shape[0]} pages of {PAGE_SIZE}; "
            f"got {int(slots[outside][0])}"
        )
    if distinct:
        values, counts = slots.unique(return_counts=True)
        if (counts > 1).any():
            raise ArgumentValueError(
                f"slots: expected distinct slots; got {int(values[counts > 1][0])} "
                f"{int(counts.max())} times"
            )
