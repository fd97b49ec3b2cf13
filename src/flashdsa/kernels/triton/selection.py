"""Exact top-k of rows of scores in Triton: the k-th key by digits of 8 bits, then one pass to write.

A program takes a row. Positions come in ascending order; of equal scores at the cut-off the first
ones win. A score of -inf or NaN ranks last, and what is not `selectable` never counts.
"""

from __future__ import annotations

import triton
import triton.language as tl

DIGITS = tl.constexpr(256)


@triton.jit
def keys_of(scores, position, inside):
    """Keys uint32, greater for better scores: 1 for NaN, 0 for positions outside."""
    score = tl.load(scores + position, mask=inside, other=0.0) + 0.0  # -0 becomes 0
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)
    key = tl.where(score == score, key, 1)
    return tl.where(inside, tl.maximum(key, 1), 0)


@triton.jit
def select(
    scores, begins, ends, out, row_stride, topk, BLOCK: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Write each row's best positions from `begins` to `ends` into out (B, topk) int32, then -1.

    Args:
        scores: rows at `row_stride`. OFFSET: positions are counted from the row's begin.
    """
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(begins + row), tl.load(ends + row)
    source, to = scores + row * row_stride, out + row * topk
    wanted = tl.minimum(topk, end - begin)
    prefix = tl.zeros([], tl.uint32)
    left = wanted
    digit = tl.arange(0, DIGITS)
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([2 * DIGITS], tl.int32)
        for first in range(begin, end, BLOCK):
            position = first + tl.arange(0, BLOCK)
            key = keys_of(source, position, position < end)
            same = key != 0
            if step > 0:
                same = same & ((key >> (shift + 8)) == prefix)
            # Keys that do not count have a bin of their own.
            own = tl.where(same, ((key >> shift) & 255).to(tl.int32), DIGITS)
            counts += tl.histogram(own, 2 * DIGITS)
        counts = tl.sum(tl.where(tl.arange(0, 2)[:, None] == 0, counts.reshape(2, DIGITS), 0), 0)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # keys with a greater digit
        # The greatest digit that has the wanted number of keys with it and above.
        found = tl.max(tl.where(above + counts >= left, digit, 0), 0)
        left -= tl.sum(tl.where(digit == found, above, 0), 0)
        prefix = (prefix << 8) | found.to(tl.uint32)
    written = 0
    ties = 0
    for first in range(begin, end, BLOCK):
        position = first + tl.arange(0, BLOCK)
        key = keys_of(source, position, position < end)
        equal = (key == prefix) & (key != 0)
        rank = ties + tl.cumsum(equal.to(tl.int32), 0)
        chosen = ((key > prefix) | (equal & (rank <= left))) & (wanted > 0)
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        shown = position - begin if OFFSET else position
        tl.store(to + place, shown, mask=chosen)
        written += tl.sum(chosen.to(tl.int32), 0)
        ties += tl.sum(equal.to(tl.int32), 0)
    for first in range(wanted, topk, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        tl.store(to + slot, -1, mask=slot < topk)
