"""Exact top-k of rows of scores in Triton, for rows of any length.

A program holds BLOCK scores of a row as integer keys in registers, finds the least one that is
chosen by bisection, and writes what it chooses in the order of positions. Of a longer row each
part's best are chosen so, then the best of these: of equal scores the first ones win each time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdsa.kernels.triton.index_scores import NEVER, range_of


@triton.jit
def keys_of(bits, inside, MARKED: tl.constexpr):
    """Keys uint32, greater for better scores: 1 for NaN, 0 for what is not to be chosen."""
    score = bits.to(tl.float32, bitcast=True)
    folded = (score + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    key = tl.where(folded < 0, ~folded, folded ^ -2147483648).to(tl.uint32, bitcast=True)
    key = tl.where(score == score, key, 1)
    if MARKED:
        inside = inside & (bits != NEVER)
    return tl.where(inside, key, 0)


@triton.jit
def select(
    scores, positions, begins, ends, table, out, out_keys, stride, width, topk, next_n,
    table_stride, BLOCK: tl.constexpr, FROM_0: tl.constexpr, LISTED: tl.constexpr,
    MARKED: tl.constexpr, TABLE_PAGE: tl.constexpr, KEYED: tl.constexpr,
):  # fmt: skip
    """The best of each row's BLOCK scores, of (rows, parts) programs, in ascending position.

    Args:
        scores: rows at `stride`, bits of fp32; MARKED: those that are `NEVER` are not chosen.
            LISTED: keys, which have `positions` (rows, width) int32, ascending.
        begins, ends: (rows,) int32, the positions to choose from; FROM_0: from 0 on.
        out: (rows, parts, topk) int32, positions and then -1; with TABLE_PAGE the slots that
            `table`, rows at `table_stride` for next_n rows each, has for them.
        out_keys: KEYED: as out, their keys and then 0.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores += row * stride
    first = part * BLOCK
    position = first + tl.arange(0, BLOCK)
    if LISTED:
        key = tl.load(scores + position, mask=position < width, other=0)
        key = key.to(tl.uint32, bitcast=True)
    else:
        begin, end = range_of(begins, ends, row, True, width, FROM_0)
        # Masks of whole vectors; what lies outside the row's range is read, and does not count.
        meets = (first < end) & (first + BLOCK > begin)
        bits = tl.load(scores + position, mask=(position < width) & meets, other=0)
        key = keys_of(bits, (position >= begin) & (position < end), MARKED)
    # INVARIANT: `found` keys are at least `low`, no fewer than wanted; of `high` there are fewer.
    found = tl.sum((key > 0).to(tl.int32), 0)
    wanted = tl.minimum(found, topk)
    high = tl.max(key, 0) + 1
    low = tl.min(tl.where(key > 0, key, high), 0)
    while (found > wanted) & (high - low > 1):
        middle = low + (high - low) // 2
        count = tl.sum((key >= middle).to(tl.int32), 0)
        enough = count >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        found = tl.where(enough, count, found)
    greater, equal = key > low, key == low
    ties = wanted - tl.sum(greater.to(tl.int32), 0)
    # Two sums in one: both stay below 2^16.
    sums = tl.cumsum(greater.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
    of_equal = sums >> 16
    chosen = greater | (equal & (of_equal <= ties))
    out += (row * tl.num_programs(1) + part) * topk
    out_keys += (row * tl.num_programs(1) + part) * topk
    slot = (sums & 0xFFFF) + tl.minimum(of_equal, ties) - 1
    if KEYED:
        tl.store(out_keys + slot, key.to(tl.int32, bitcast=True), mask=chosen)
    if LISTED:
        positions += row * width
        position = tl.load(positions + position, mask=chosen, other=0)
    if TABLE_PAGE > 0:
        table += row // next_n * table_stride
        entry = tl.load(table + position // TABLE_PAGE, mask=chosen, other=0)
        position = entry * TABLE_PAGE + position % TABLE_PAGE
    tl.store(out + slot, position, mask=chosen)
    for begin_of in range(0, topk, BLOCK):
        empty = begin_of + tl.arange(0, BLOCK)
        rest = (empty >= wanted) & (empty < topk)
        tl.store(out + empty, -1, mask=rest)
        if KEYED:
            tl.store(out_keys + empty, 0, mask=rest)
