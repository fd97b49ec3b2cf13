"""Columns of kv rows as products take them: as they lie, or decoded from packed rows (row_formats).

The columns of V come in parts of WIDTH, of packed rows 128. A value is a code times its scale.
bf16 holds the product where the scale is a power of two, or the code e2m1; a scale in fp32 is left
to the caller, whose products it is a factor of: codes are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(128)


@triton.jit
def fence(FENCED: tl.constexpr):
    """Show wgmma what cp.async has written: before 3.7 Triton does not."""
    if FENCED:
        asm: tl.constexpr = "fence.proxy.async.shared::cta; mov.b32 $0, $1;"
        tl.inline_asm_elementwise(asm, "=r,r", [tl.zeros([], tl.int32)], tl.int32, False, 1)


@triton.jit
def place_rows(kv, row, stride, page_rows, FORM: tl.constexpr):
    """Pointers (BLOCK_K,) to rows, and to their scales. `stride`: from row to row, packed from page
    to page."""
    if FORM is None:
        data = kv + row * stride
        scales = data
    else:
        number = row.to(tl.int32)  # of a valid one; divisions of 64 bits are slow
        page = kv + (number // page_rows).to(tl.int64) * stride
        slot = number % page_rows
        if FORM.split:
            data = page + slot * FORM.data_bytes
            scales = page + page_rows * FORM.data_bytes + slot * FORM.scale_bytes
        else:
            data = page + slot * FORM.row_bytes
            scales = data + FORM.code_bytes
    return data, scales


@triton.jit
def load_factors(scales, valid):
    """A row's four scales in fp32, (BLOCK_K,) each, of a format that has such: loaded together, as
    Triton repeats small loads in every layout that wants them."""
    place = scales.to(tl.pointer_type(tl.float32))[:, None] + tl.arange(0, 4)[None, :]
    four = tl.load(place, mask=valid[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(four, (scales.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def load_part(data, scales, valid, N: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr,
              FP8: tl.constexpr):  # fmt: skip
    """Columns of part N (BLOCK_K, columns), 0 where not valid; without scales in fp32."""
    if FORM is None:
        column = N * WIDTH + tl.arange(0, WIDTH)
        values = tl.load(data[:, None] + column[None, :], mask=valid[:, None], other=0.0)
    else:
        column = N * COLUMNS + tl.arange(0, COLUMNS)
        if FORM.fp4:
            byte = N * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            pairs = tl.load(data[:, None] + byte[None, :], mask=valid[:, None], other=0)
            found = e2m1(tl.interleave(pairs & 15, pairs >> 4))
        else:
            there = valid[:, None] & (column < FORM.columns)[None, :]
            found = e4m3(tl.load(data[:, None] + column[None, :], mask=there, other=0), FP8)
        if FORM.scale != "fp32":
            groups: tl.constexpr = COLUMNS // FORM.group
            group = N * groups + tl.arange(0, groups)
            there = valid[:, None] & (group < FORM.num_scales)[None, :]
            code = tl.load(scales[:, None] + group[None, :], mask=there, other=0)
            scale = e4m3(code, FP8) if FORM.scale == "e4m3" else e8m0(code)
            grouped = tl.reshape(found, (found.shape[0], groups, FORM.group)) * scale[:, :, None]
            found = tl.reshape(grouped, (found.shape[0], COLUMNS))
        values = found.to(tl.bfloat16)
        if FORM.columns < (N + 1) * COLUMNS:
            place = data.to(tl.pointer_type(tl.bfloat16))[:, None] + (
                FORM.rope_at // 2 - FORM.columns + column
            )
            there = valid[:, None] & (column >= FORM.columns)[None, :]
            rope = tl.load(place, mask=there, other=0.0)
            values = tl.where((column < FORM.columns)[None, :], values, rope)
    return values


@triton.jit
def load_rope(data, valid, D_V: tl.constexpr, D_ROPE: tl.constexpr, FORM: tl.constexpr):
    """Columns after those of V (BLOCK_K, D_ROPE), 0 where not valid."""
    if FORM is None:
        place = data + D_V
    else:
        place = data.to(tl.pointer_type(tl.bfloat16)) + FORM.rope_at // 2
    column = tl.arange(0, D_ROPE)
    return tl.load(place[:, None] + column[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def e4m3(code, FP8: tl.constexpr):
    """fp32 of bytes; without FP8, which GPUs have from 8.9 on, by integers.

    An exponent of 4 bits with bias 7 lies in fp32's field of 8 bits with bias 127, so the number is
    2^-120 times its value; subnormal ones, too. 0x7F is NaN.
    """
    if FP8:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        size = (code & 0x7F).to(tl.uint32)
        value = (size << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        value = tl.where(size == 0x7F, float("nan"), value)
        value = tl.where(code >= 128, -value, value)
    return value


@triton.jit
def e2m1(code):
    """fp32 of 4 bits, in the same way: an exponent of 2 bits with bias 1."""
    size = (code & 7).to(tl.uint32)
    value = (size << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return tl.where(code >= 8, -value, value)


@triton.jit
def e8m0(code):
    """fp32 of bytes: 0 is 2^-127, a subnormal number, and 255 is NaN."""
    bits = code.to(tl.int32)
    special = ((bits == 0) | (bits == 255)).to(tl.int32)
    return ((bits << 23) | (special << 22)).to(tl.float32, bitcast=True)
