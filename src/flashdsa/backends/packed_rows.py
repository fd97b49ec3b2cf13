"""Packed kv rows in torch and on any device: quantised, taken from pages, and read back.

The host reads no value, and copies none to the device: a CUDA graph may capture all of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.problem import E4M3_MAX, MIN_AMAX
from flashdsa.row_formats import RowFormat, find_row_format

E2M1_MAX = 6.0
"""Largest number of a 4-bit float with 2 exponent bits and 1 of mantissa."""
E4M3_LEAST = 2.0**-9
"""Least positive e4m3 number."""
LEAST_NORMAL = 2.0**-126
"""Least positive fp32 number with all its bits."""


def is_packed(kv: Tensor) -> bool:
    """Whether rows of `kv` are bytes."""
    return kv.dtype in (torch.uint8, torch.int8)


def pack(rows: Tensor, form: RowFormat, *, power_of_two: bool) -> Tensor:
    """Rows (T, d_qk) bf16 or fp32 as (T, row_bytes) uint8, each with its scales.

    A group's scale is by `_scales`; values are rounded to nearest even.

    Args:
        power_of_two: whether an fp32 scale is rounded up to one.
    """
    groups = rows[:, : form.columns].float().unflatten(1, (-1, form.group))
    scale, stored = _scales(groups, form, power_of_two)
    coded = (groups / scale[..., None]).flatten(1)
    if form.scale == "e4m3":  # which may be rounded down: torch makes NaN of what is above 448
        coded = coded.clamp(-E4M3_MAX, E4M3_MAX)
    codes = _e2m1_bytes(coded) if form.fp4 else coded.to(torch.float8_e4m3fn).view(torch.uint8)
    rope = rows[:, form.columns :].to(torch.bfloat16).contiguous().view(torch.uint8)
    stored = pad(stored, (0, form.unused))
    return torch.cat([codes, rope, stored] if form.split else [codes, stored, rope], dim=1)


def scale_of(x: Tensor, most: float = E4M3_MAX) -> Tensor:
    """``max(amax, 1e-4) / most`` over the last dimension of fp32 `x`, which the result lacks.

    Divided as IEEE 754 says: torch on a GPU multiplies by the reciprocal of a divisor that is a
    number or lies on the CPU, and the last bit differs. (`new_full` fails in a vmap of no element.)
    """
    largest = x.abs().amax(-1).clamp_min(MIN_AMAX)
    return largest / torch.full((), most, dtype=x.dtype, device=x.device)


def _scales(groups: Tensor, form: RowFormat, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return the scales (T, num_scales) of groups in fp32, and their bytes (T, stored_scales).

    With the largest code m, 448 or 6 of e2m1: fp32: max(amax, 1e-4) / m. e8m0: max(amax / 448,
    1e-4), rounded up to a power of two, and of e2m1 max(amax / 6, 2^-126). e4m3: amax / m within
    [2^-9, 448], rounded to nearest. A group that is not finite has no finite one.
    """
    most = E2M1_MAX if form.fp4 else E4M3_MAX
    if form.scale == "fp32":
        scale = scale_of(groups, most)
        scale = next_power_of_two(scale) if power_of_two else scale
        return scale, scale.view(torch.uint8)
    largest = groups.abs().amax(-1)
    # Divided as in `scale_of`.
    scale = largest / torch.full((), most, dtype=largest.dtype, device=largest.device)
    if form.scale == "e8m0":
        scale = next_power_of_two(scale.clamp_min(LEAST_NORMAL if form.fp4 else MIN_AMAX))
        return scale, (scale.view(torch.int32) >> 23).to(torch.uint8)
    scale = scale.clamp(E4M3_LEAST, E4M3_MAX).where(largest.isfinite(), torch.nan)
    stored = scale.to(torch.float8_e4m3fn)
    return stored.float(), stored.view(torch.uint8)


def _e2m1_bytes(x: Tensor) -> Tensor:
    """fp32 (T, n) as e2m1 (T, n / 2): nearest even, 6 at most, the even column in the low half."""
    size = x.abs()
    code = (size > 0.25).to(torch.uint8)
    # A code is the number of borders below; a border belongs to the even code beside it.
    for border, is_below in ((0.75, size.ge), (1.25, size.gt), (1.75, size.ge), (2.5, size.gt)):
        code += is_below(border)
    code += size.ge(3.5)
    code += size.gt(5.0)
    code |= x.signbit().to(torch.uint8) << 3
    return code[:, 0::2] | code[:, 1::2] << 4


def e2m1_values(codes: Tensor) -> Tensor:
    """Bytes (T, n) as fp32 (T, 2 n)."""
    code = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)
    size = code & 7
    # Twice the value is 0 1 2 3 4 6 8 12.
    double = torch.where(size < 4, size, torch.where(size < 6, 2 * size - 4, 4 * size - 16))
    value = double.float() / 2
    return torch.where(code > 7, -value, value)


def next_power_of_two(scale: Tensor) -> Tensor:
    """The least power of two that is not below each of `scale`: fp32, positive, no subnormals.

    NaN and infinity stay.
    """
    # A significand above 1.0 carries into the exponent.
    rounded = (scale.view(torch.int32) + (2**23 - 1)) & (0xFF << 23)
    return torch.where(scale.isfinite(), rounded.view(torch.float32), scale)


def unpack(rows: Tensor, form: RowFormat, dtype: torch.dtype) -> Tensor:
    """Packed rows (T, row_bytes) as (T, d_qk) of `dtype`: products are fp32, or fp64 for fp64."""
    rows = rows.contiguous().view(torch.uint8)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    codes = rows[:, : form.code_bytes].contiguous()
    values = e2m1_values(codes) if form.fp4 else codes.view(torch.float8_e4m3fn)
    stored = _copy_at(rows, form.scales_at, form.stored_scales)
    if form.scale == "e8m0":
        # 0 is 2^-127, a subnormal number, and 255 is NaN.
        bits = stored.int()
        bits = bits << 23 | ((bits == 0) | (bits == 255)).int() << 22
        scale = bits.view(torch.float32)
    else:
        scale = stored.view(torch.float32 if form.scale == "fp32" else torch.float8_e4m3fn)
    groups = values.to(wide).unflatten(1, (-1, form.group)) * scale.to(wide)[..., None]
    coded: Tensor = groups.flatten(1).to(dtype)
    if not form.rope:
        return coded
    rope = _copy_at(rows, form.rope_at, 2 * form.rope).view(torch.bfloat16)
    return torch.cat([coded, rope.to(dtype)], dim=1)


def _copy_at(rows: Tensor, first: int, count: int) -> Tensor:
    """Bytes [first, first + count) of each row, in memory of their own: a view of wider numbers
    must begin at a multiple of their bytes, which those of a row alone may not."""
    return rows[:, first : first + count].clone(memory_format=torch.contiguous_format)


def form_of(kv: Tensor, kv_format: str | None) -> RowFormat | None:
    """Return the format of packed rows or pages of a call; None of other rows."""
    return find_row_format("kv", kv.shape, kv_format, alone=False) if is_packed(kv) else None


def num_rows(*sources: Tensor | None) -> int:
    """Rows of all sources, each (S_kv, width), or pages (num_pages, page_size, width), or None."""
    return sum(math.prod(kv.shape[:-1]) for kv in sources if kv is not None)


def aligned_pages(kv: Tensor) -> Tensor:
    """Rows (S_kv, row_bytes) or pages of them as pages (num_pages, page_size, row_bytes) that begin
    at multiples of 16 bytes and have no gaps inside: views where they do, else copies."""
    if kv.dim() == 2:  # one page of them all may have more bytes than an Int32 counts
        kv = kv[:, None]
    num_pages, page_size, row_bytes = kv.shape
    apart = -(-page_size * row_bytes // BULK_ALIGNMENT) * BULK_ALIGNMENT
    if kv.numel() and kv[0].is_contiguous() and not kv.data_ptr() % BULK_ALIGNMENT:
        stride = kv.stride(0) if num_pages > 1 else apart
        if not stride % BULK_ALIGNMENT:
            return kv.as_strided(kv.shape, (stride, row_bytes, 1))
    memory = kv.new_empty(num_pages, apart)
    return memory.as_strided(kv.shape, (apart, row_bytes, 1)).copy_(kv)


def parts_of(pages: Tensor, form: RowFormat | None) -> list[Tensor]:
    """Views (num_pages, page_size, width) of pages of rows; a row is its parts side by side.

    Args:
        pages: (num_pages, page_size, row_bytes); of a split format with contiguous pages.
        form: of packed rows; None for others.
    """
    if form is None or not form.split:
        return [pages]
    num_pages, page_size, row_bytes = pages.shape
    flat, data = pages.view(num_pages, page_size * row_bytes), page_size * form.data_bytes
    return [
        flat[:, :data].view(num_pages, page_size, form.data_bytes),
        flat[:, data:].view(num_pages, page_size, form.scale_bytes),
    ]


def put(parts: list[Tensor], slots: Tensor, rows: Tensor) -> None:
    """Write rows (T, width) into the slots (T,) of pages; those outside are skipped.

    Args:
        parts: of at least one page and row, as `parts_of` gives them. slots: int32 or int64.
    """
    valid = (slots >= 0) & (slots < parts[0].shape[0] * parts[0].shape[1])
    # A row that is to be skipped repeats what the first valid one writes; without a valid row
    # slot 0 gets what it holds. So nothing depends on a value on the host.
    # An index without dimensions, too, would be read by the host.
    first, some = valid.to(torch.uint8).argmax(), valid.any()
    chosen = torch.where(valid, torch.arange(slots.shape[0], device=slots.device), first)
    slot = torch.where(some, slots[chosen], 0).long()
    for part, written in zip(parts, rows.split([x.shape[2] for x in parts], 1), strict=True):
        values = torch.where(some, written[chosen], part[0, 0])
        part.index_put_((slot // part.shape[1], slot % part.shape[1]), values)


def take(kv: Tensor, form: RowFormat | None, slots: Tensor) -> Tensor:
    """Rows (T, width) of the slots (T,), int32 or int64, of rows (S_kv, width) or of pages as
    `parts_of` takes them."""
    if kv.dim() == 2:
        return kv.index_select(0, slots)
    page, offset = slots // kv.shape[1], slots % kv.shape[1]
    return torch.cat([part[page, offset] for part in parts_of(kv, form)], dim=1)
