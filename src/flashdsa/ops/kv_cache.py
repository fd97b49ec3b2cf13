"""kv cache: packed rows, and writing and reading rows of either form by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.backends.packed_rows import pack, parts_of, put, take, unpack
from flashdsa.dispatch import checks
from flashdsa.dispatch.autograd import refuse_tangents
from flashdsa.dispatch.overlap import require_addresses_of_its_own, require_apart
from flashdsa.dispatch.registration import opaque
from flashdsa.dispatch.transforms import require_batch, require_byte_views
from flashdsa.errors import ArgumentValueError
from flashdsa.row_formats import RowFormat, row_format

__all__ = ["quantize_kv", "read_kv_cache", "write_kv_cache"]

_SCALES = ("ue8m0", "fp32")
_ROW_DTYPES = (torch.bfloat16, torch.float32)
_CACHE_DTYPES = (torch.bfloat16, torch.uint8, torch.int8)


def quantize_kv(kv: Tensor, *, scale: str = "ue8m0", kv_format: str = "v32") -> Tensor:
    """Rows of kv as packed rows, each with its scales: columns as codes, or as bf16, see the page
    "DeepSeek Sparse Attention".

    Args:
        kv: (T, d_qk) or (T, 1, d_qk) bf16 or fp32; d_qk = 576 of "v32", 512 of the other formats
            below, else that of your own.
        scale: of formats with fp32 scales. "fp32": ``max(amax, 1e-4) / 448``; "ue8m0": rounded up
            to a power of two, which other kernels rely on (FlashMLA's).
        kv_format: "v32" (656 bytes), "v32_no_rope" (528), "v4" (584), "v41" (528), "v41_fp4" (288),
            the last two also with "_interleaved" behind, or a format of your own
            (`flashdsa.row_formats`).

    Returns:
        (T, bytes) uint8; a row's values are ``code * scale``, and the bf16 columns.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    form = row_format(kv_format)
    power_of_two = _is_power_of_two(scale, form)
    require_byte_views("quantize_kv", kv)
    return pack(_rows(kv, form.d_qk), form, power_of_two=power_of_two)


def write_kv_cache(
    kv: Tensor, slots: Tensor, cache: Tensor, *, scale: str = "ue8m0", kv_format: str | None = None
) -> None:
    """Write row t of `kv` into slot `slots[t]` of the cache, quantised if its rows are packed.

    -1 skips a row (padding). If values are checked (on the CPU, or with FLASHDSA_CHECK=1), any
    other slot outside the cache, or one that is named twice, is an error and nothing is written.
    Without checks, a slot outside is skipped, and a slot named twice gets bytes of any of its rows.
    The host reads no value then: a CUDA graph may capture the call.

    Args:
        kv: (T, d) or (T, 1, d) bf16 or fp32.
        slots: (T,) int32 or int64: ``page * page_size + offset``.
        cache: changed in place; (S_kv, width), (num_pages, page_size, width) or (num_pages,
            page_size, 1, width): d of bf16, or a packed row's bytes of uint8 or int8. Pages may
            lie apart; what is between them stays. It overlaps neither itself nor `kv` or `slots`.
        scale, kv_format: as for `quantize_kv`; the format is found by the bytes of a row, but 528
            and 288 bytes need its name.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    refuse_tangents("write_kv_cache", (kv,))
    checks.require_tensor("kv", kv)
    pages, form = require_cache("cache", cache, kv_format, kv, "kv")
    power_of_two = _is_power_of_two(scale, form)
    rows = _rows(kv, columns_of(pages, form))
    _check_slots(slots, rows)
    require_apart(("cache", "kv", "slots"), (cache, kv, slots), written=[0])
    require_batch("write_kv_cache", "cache", cache, (kv, slots))
    if form is not None:
        require_byte_views("write_kv_cache", kv, cache)
    num_slots = pages.shape[0] * pages.shape[1]
    if checks.are_values_read(slots):
        slots = _checked_slots(slots, num_slots, True)
    if not slots.shape[0] or not num_slots:
        return
    rows = rows.to(cache.dtype) if form is None else pack(rows, form, power_of_two=power_of_two)
    put(parts_of(pages, form), slots, rows)


def read_kv_cache(cache: Tensor, slots: Tensor, *, kv_format: str | None = None) -> Tensor:
    """Rows of the cache in bf16; packed rows as ``code * scale``, rounded to bf16.

    A slot outside the cache reads as 0; where values are checked (see `write_kv_cache`) it is an
    error.

    Args:
        cache, kv_format: as for `write_kv_cache`. slots: (T,) int32 or int64.

    Returns:
        (T, d) bf16.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    pages, form = _pages("cache", cache, kv_format)
    _check_slots(slots)
    checks.require_device("slots", slots, cache.device, "cache")
    if form is not None:
        require_byte_views("read_kv_cache", cache, slots)
    num_slots = pages.shape[0] * pages.shape[1]
    if checks.are_values_read(slots):
        slots = _checked_slots(slots, num_slots, False)
    if not num_slots:
        return torch.zeros(
            slots.shape[0], columns_of(pages, form), dtype=torch.bfloat16, device=cache.device
        )
    inside = (slots >= 0) & (slots < num_slots)
    rows = take(pages, form, torch.where(inside, slots, 0).long())
    rows = rows if form is None else unpack(rows, form, torch.bfloat16)
    return rows.masked_fill(~inside[:, None], 0)


def _is_power_of_two(scale: object, form: RowFormat | None) -> bool:
    """Whether `scale` asks for one; fp32 scales may be any number."""
    if scale not in _SCALES:
        raise ArgumentValueError(f"scale: expected one of {', '.join(_SCALES)}; got {scale!r}")
    if form is not None and form.scale != scale == "fp32":
        raise ArgumentValueError(f"scale: {form.name} has {form.scale} scales; got {scale!r}")
    return scale == "ue8m0"


def _rows(kv: Tensor, columns: int) -> Tensor:
    """kv as (T, columns)."""
    checks.require_tensor("kv", kv)
    checks.require_dtype("kv", kv, *_ROW_DTYPES)
    layout = f"[T, {columns}] or [T, 1, {columns}]"
    checks.require_rank("kv", kv, (2, 3), layout)
    count = kv.shape[0]
    checks.require_shape(
        "kv", kv, (count, columns) if kv.dim() == 2 else (count, 1, columns), layout
    )
    return kv.detach().reshape(count, columns)


def _pages(name: str, cache: Tensor, kv_format: str | None) -> tuple[Tensor, RowFormat | None]:
    """A view of the cache as (num_pages, page_size, width), bytes as uint8, and their format. Rows
    without pages are pages of one row."""
    checks.require_tensor(name, cache)
    checks.require_dtype(name, cache, *_CACHE_DTYPES)
    layout = "[S_kv, d], [num_pages, page_size, d] or [num_pages, page_size, 1, d]"
    checks.require_rank(name, cache, (2, 3, 4), layout)
    if cache.dim() == 4:
        checks.require_shape(name, cache, [*cache.shape[:2], 1, cache.shape[3]], layout)
    pages = cache.squeeze(2) if cache.dim() == 4 else cache
    pages = pages[:, None] if cache.dim() == 2 else pages
    form = checks.row_format_of(name, cache, kv_format)
    if form is not None and pages.dtype is not torch.uint8:
        pages = pages.view(torch.uint8)
    return pages, form


def columns_of(pages: Tensor, form: RowFormat | None) -> int:
    """Columns of a cache's rows."""
    return pages.shape[2] if form is None else form.d_qk


def require_cache(
    name: str, cache: Tensor, kv_format: str | None, rows: Tensor, like: str
) -> tuple[Tensor, RowFormat | None]:
    """Return the pages and the format of a cache to which `rows`, argument `like`, can be
    written."""
    pages, form = _pages(name, cache, kv_format)
    checks.require_dtype(like, rows, *_ROW_DTYPES)
    checks.require_device(name, cache, rows.device, like)
    checks.require_writable(name, cache)
    require_addresses_of_its_own(name, cache)
    return pages, form


def _check_slots(slots: Tensor, rows: Tensor | None = None) -> None:
    """One slot a row, on its device."""
    checks.require_tensor("slots", slots)
    checks.require_dtype("slots", slots, torch.int32, torch.int64)
    checks.require_rank("slots", slots, (1,), "[T]")
    if rows is not None:
        checks.require_shape("slots", slots, (rows.shape[0],), "[T], one a row of kv,")
        checks.require_device("slots", slots, rows.device, "kv")


@opaque(
    "checked_slots(Tensor slots, SymInt num_slots, bool padding) -> Tensor",
    fake=lambda slots, *_: torch.empty_like(slots),
)
def _checked_slots(slots: Tensor, num_slots: int, padding: bool) -> Tensor:
    """The slots; ArgumentValueError for one outside the pages. With `padding` -1 may come, and none
    may come twice."""
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
    return slots.clone()
