"""kv cache: packed rows, and writing and reading rows of either form by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.backends.packed_rows import is_packed, pack, unpack
from flashdsa.dispatch.autograd import refuse_tangents
from flashdsa.dispatch.checks import (
    are_values_read,
    require_device,
    require_dtype,
    require_rank,
    require_shape,
    require_tensor,
)
from flashdsa.dispatch.overlap import require_addresses_of_its_own, require_apart
from flashdsa.errors import ArgumentValueError
from flashdsa.problem import D_QK, KV_ROW_BYTES

__all__ = ["quantize_kv", "read_kv_cache", "write_kv_cache"]

_SCALES = ("ue8m0", "fp32")
_CACHE_DTYPES = (torch.bfloat16, torch.uint8, torch.int8)


def quantize_kv(kv: Tensor, *, scale: str = "ue8m0") -> Tensor:
    """Rows of kv as 656 bytes: 512 e4m3 (latent columns), four fp32 scales, 64 bf16 (RoPE).

    Args:
        kv: (T, 576) or (T, 1, 576) bf16 or fp32.
        scale: of each 128 latent columns. "fp32": ``max(amax, 1e-4) / 448``; "ue8m0": rounded up
            to a power of two, which other kernels rely on (FlashMLA's).

    Returns:
        (T, 656) uint8; a row's values are ``e4m3 * scale``, and the RoPE columns.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    rows = _rows(kv)
    return pack(rows, power_of_two=_is_power_of_two(scale))


def write_kv_cache(kv: Tensor, slots: Tensor, cache: Tensor, *, scale: str = "ue8m0") -> None:
    """Write row t of `kv` into slot `slots[t]` of the cache, quantised if its rows are packed.

    -1 skips a row (padding). If values are checked (on the CPU, or with FLASHDSA_CHECK=1), any
    other slot outside the cache, or one that is named twice, is an error and nothing is written.
    Without checks, a slot outside is skipped, and a slot named twice gets either row. The host
    reads no value then: a CUDA graph may capture the call.

    Args:
        kv: (T, 576) or (T, 1, 576) bf16 or fp32.
        slots: (T,) int32 or int64: ``page * page_size + offset``.
        cache: changed in place; (S_kv, d), (num_pages, page_size, d) or (num_pages, page_size, 1,
            d): d = 576 of bf16, or 656 of uint8 or int8. It overlaps neither itself nor `kv` or
            `slots`.
        scale: as for `quantize_kv`.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    power_of_two = _is_power_of_two(scale)
    refuse_tangents("write_kv_cache", (kv,))
    rows, pages = _rows(kv), _pages(cache)
    require_device("cache", cache, kv.device, "kv")
    _check_slots(slots, rows)
    require_addresses_of_its_own("cache", cache)
    require_apart(("cache", "kv", "slots"), (cache, kv, slots), written=[0])
    if are_values_read(slots):
        _require_inside(slots, pages, padding=True)
    rows = pack(rows, power_of_two=power_of_two) if is_packed(cache) else rows.to(cache.dtype)
    rows = rows.view(pages.dtype)
    num_slots = pages.shape[0] * pages.shape[1]
    if not len(slots) or not num_slots:
        return
    valid = (slots >= 0) & (slots < num_slots)
    # A row that is to be skipped repeats what the first valid one writes; without a valid row
    # slot 0 gets what it holds. So nothing depends on a value on the host.
    # An index without dimensions, too, would be read by the host.
    first, some = valid.to(torch.uint8).argmax(), valid.any()
    chosen = torch.where(valid, torch.arange(len(slots), device=slots.device), first)
    slot = torch.where(some, slots[chosen], 0).long()
    values = torch.where(some, rows[chosen], pages[0, 0])
    pages.index_put_((slot // pages.shape[1], slot % pages.shape[1]), values)


def read_kv_cache(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows of the cache in bf16; packed rows as ``e4m3 * scale``, rounded to bf16.

    A slot outside the cache reads as 0; where values are checked (see `write_kv_cache`) it is an
    error.

    Args:
        cache: as for `write_kv_cache`. slots: (T,) int32 or int64.

    Returns:
        (T, 576) bf16.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    pages = _pages(cache)
    _check_slots(slots)
    require_device("slots", slots, cache.device, "cache")
    if are_values_read(slots):
        _require_inside(slots, pages, padding=False)
    num_slots = pages.shape[0] * pages.shape[1]
    if not num_slots:
        return torch.zeros(len(slots), D_QK, dtype=torch.bfloat16, device=cache.device)
    inside = (slots >= 0) & (slots < num_slots)
    slot = torch.where(inside, slots, 0).long()
    rows = pages[slot // pages.shape[1], slot % pages.shape[1]]
    rows = unpack(rows, torch.bfloat16) if is_packed(cache) else rows
    return rows.masked_fill(~inside[:, None], 0)


def _is_power_of_two(scale: object) -> bool:
    if scale not in _SCALES:
        raise ArgumentValueError(f"scale: expected one of {', '.join(_SCALES)}; got {scale!r}")
    return scale == "ue8m0"


def _rows(kv: Tensor) -> Tensor:
    """kv as (T, 576)."""
    require_tensor("kv", kv)
    require_dtype("kv", kv, torch.bfloat16, torch.float32)
    layout = f"[T, {D_QK}] or [T, 1, {D_QK}]"
    require_rank("kv", kv, (2, 3), layout)
    count = kv.shape[0]
    require_shape("kv", kv, (count, D_QK) if kv.dim() == 2 else (count, 1, D_QK), layout)
    return kv.detach().reshape(count, D_QK)


def _pages(cache: Tensor) -> Tensor:
    """A view of the cache as (num_pages, page_size, d), bytes as uint8."""
    require_tensor("cache", cache)
    require_dtype("cache", cache, *_CACHE_DTYPES)
    width = KV_ROW_BYTES if is_packed(cache) else D_QK
    layout = f"[S_kv, {width}], [num_pages, page_size, {width}] or [num_pages, page_size, 1, d]"
    require_rank("cache", cache, (2, 3, 4), layout)
    expected = [*cache.shape[:2], 1, width] if cache.dim() == 4 else [*cache.shape[:-1], width]
    require_shape("cache", cache, expected, layout)
    pages = cache.squeeze(2) if cache.dim() == 4 else cache
    pages = pages[None] if cache.dim() == 2 else pages
    return pages.view(torch.uint8) if is_packed(cache) else pages


def _check_slots(slots: Tensor, rows: Tensor | None = None) -> None:
    """One slot a row, on its device."""
    require_tensor("slots", slots)
    require_dtype("slots", slots, torch.int32, torch.int64)
    require_rank("slots", slots, (1,), "[T]")
    if rows is not None:
        require_shape("slots", slots, (len(rows),), "[T], one a row of kv,")
        require_device("slots", slots, rows.device, "kv")


def _require_inside(slots: Tensor, pages: Tensor, *, padding: bool) -> None:
    """Raise ArgumentValueError for a slot outside the pages; with `padding` -1 may come, and none
    may come twice."""
    num_slots = pages.shape[0] * pages.shape[1]
    used = slots[slots != -1] if padding else slots
    outside = (used < 0) | (used >= num_slots)
    if outside.any():
        raise ArgumentValueError(
            f"slots: expected slots in [0, {num_slots}); got {int(used[outside][0])}"
        )
    if padding:
        values, counts = used.unique(return_counts=True)
        if (counts > 1).any():
            raise ArgumentValueError(
                f"slots: expected distinct slots; got {int(values[counts > 1][0])} "
                f"{int(counts.max())} times"
            )
