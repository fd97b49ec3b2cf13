"""The indexer's scores in Triton: sum_h weights relu(q . k), over pages and over shared keys."""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(128)
PAGE = tl.constexpr(64)
PAGE_BYTES = tl.constexpr(64 * 132)


@triton.jit
def as_bf16(code):
    """bf16 of e4m3 bytes, by integers: GPUs before 8.9 have no instruction for it.

    An exponent of 4 bits with bias 7 lies in bf16's field of 8 bits with bias 127, so the number
    is 2^-120 times its value; subnormal ones, too. A NaN's bits (0x7f) become NaN.
    """
    magnitude = (code & 0x7F).to(tl.uint32)
    small = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    value = tl.where(magnitude == 0x7F, float("nan"), small)
    return tl.where(code >= 128, -value, value).to(tl.bfloat16)


@triton.jit
def load_codes(pointer, mask, NARROW: tl.constexpr):
    """Elements as a product takes them: e4m3 bytes, where NARROW as bf16 by integers."""
    if NARROW:
        found = as_bf16(tl.load(pointer, mask=mask, other=0))
    else:
        found = tl.load(pointer, mask=mask, other=0.0)
    return found


@triton.jit
def sum_heads(q, weights, keys, row, num_heads, BLOCK_H: tl.constexpr, NARROW: tl.constexpr):
    """sum_h weights relu(q . keys) of a query's heads, BLOCK_H at a time: (tokens,)."""
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([keys.shape[1]], tl.float32)
    for first in range(0, num_heads, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        there = head < num_heads
        at = row * num_heads + head
        tile = load_codes(q + at[:, None] * COLUMNS + column[None, :], there[:, None], NARROW)
        dots = tl.dot(tile, keys)
        w = tl.load(weights + at, mask=there, other=0.0)
        total += tl.sum(tl.maximum(dots, 0.0) * w[:, None], 0)
    return total


@triton.jit
def paged(
    q, cache, scales, weights, lengths, table, out, num_heads, next_n, max_pages, num_pages,
    page_bytes, width, BLOCK_H: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Scores (B, width) fp32 of a page's tokens for each of (B, max_pages) programs.

    Args:
        q: (B, H, 128) e4m3, as bytes where NARROW. cache: pages of 64 keys, bytes; `scales` the
            same memory as fp32. table: (B / next_n, max_pages) int32. Pages that are no page, and
            tokens from a row's length on, get -inf.
    """
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.arange(0, PAGE)
    length = tl.load(lengths + row)
    page = tl.load(table + (row // next_n) * max_pages + number).to(tl.int64)
    good = (page >= 0) & (page < num_pages)
    seen = (number * PAGE + token < length) & good
    column = tl.arange(0, COLUMNS)
    at = cache + page * page_bytes + token[None, :] * COLUMNS + column[:, None]
    keys = load_codes(at, seen[None, :], NARROW)
    total = sum_heads(q, weights, keys, row, num_heads, BLOCK_H, NARROW)
    scale = tl.load(scales + (page * page_bytes + PAGE * COLUMNS) // 4 + token, mask=seen, other=0.0)
    to = out + row * width + number * PAGE + token
    tl.store(to, tl.where(seen, total * scale, float("-inf")))


@triton.jit
def shared(
    q, k, scales, weights, starts, ends, out, num_heads, num_keys, BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr, NARROW: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Scores (S, S_kv) fp32 of (S, ceil(S_kv / BLOCK_T)) programs, -inf outside a query's range."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_T
    key = first + tl.arange(0, BLOCK_T)
    there = key < num_keys
    seen = (key >= tl.load(starts + row)) & (key < tl.load(ends + row)) & there
    column = tl.arange(0, COLUMNS)
    at = k + key[None, :].to(tl.int64) * COLUMNS + column[:, None]
    keys = load_codes(at, seen[None, :], NARROW)
    total = sum_heads(q, weights, keys, row, num_heads, BLOCK_H, NARROW)
    if SCALED:
        total *= tl.load(scales + key, mask=seen, other=0.0)
    tl.store(out + row * num_keys + key, tl.where(seen, total, float("-inf")), mask=there)
