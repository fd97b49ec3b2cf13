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


@triton.jit(do_not_specialize=["next_n", "least"])
def select(
    scores, positions, begins, ends, table, out, out_keys, final, final_keys, stride,
    width: tl.int32, topk: tl.int32, next_n, table_stride, least, BLOCK: tl.constexpr,
    MOST: tl.constexpr, LEVEL: tl.constexpr, LAST: tl.constexpr, SHORT: tl.constexpr,
    FROM_0: tl.constexpr, MARKED: tl.constexpr, TABLE_PAGE: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """The best of each part of a row, BLOCK scores, of (rows, parts) programs, in ascending
    position. A row that has one part on the first level is done there; one of at most topk scores,
    of which none is marked, without a look at them, unless they are SORTED. SHORT: rows of one part
    only; other launches have those of more than `least` scores.

    Args:
        scores: rows at `stride`, bits of fp32; MARKED: those that are `NEVER` are not chosen.
            From LEVEL 1 on keys, which have `positions`, ascending, both as out.
        begins, ends: (rows,) int32, the positions below `width` to choose from; FROM_0: from 0 on.
        out, out_keys: (rows, parts, topk) int32, positions and then -1, keys and then 0.
        final: (rows, topk) int32, likewise, of rows that are done, all on the LAST level; with
            TABLE_PAGE the slots that `table`, rows at `table_stride` for next_n rows each, has.
        final_keys: SORTED: their keys.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = range_of(begins, ends, row, True, width, FROM_0)
    base = tl.multiple_of(begin // 16 * 16, 16)
    count = end - base
    if count <= least:
        return
    if SHORT:
        if count > BLOCK:
            return
    for _ in tl.static_range(LEVEL):  # on the levels before this one, of parts of MOST scores
        if count <= MOST:
            return
        count = tl.cdiv(count, MOST) * topk
    if (part > 0) & (part * BLOCK >= count):
        return
    if (LEVEL == 0) & (not MARKED) & (not SORTED):
        if end - begin <= topk:  # all of them, whose scores may be unwritten
            for first in range(0, topk, BLOCK):
                slot = first + tl.arange(0, BLOCK)
                found = tl.where(slot < end - begin, begin + slot, -1)
                tl.store(final + row * topk + slot, found, mask=slot < topk)
            return
    done = (count <= BLOCK) | LAST
    scores += row * stride
    number = part * BLOCK + tl.arange(0, BLOCK)
    if LEVEL > 0:
        key = tl.load(scores + number, mask=number < count, other=0)
        key = key.to(tl.uint32, bitcast=True)
    else:
        # Masks of whole vectors; what lies outside the row's range is read, and does not count.
        bits = tl.load(scores + base + number, mask=base + number < width, other=0)
        key = keys_of(bits, (base + number >= begin) & (number < count), MARKED)
    # INVARIANT: `found` keys are at least `low`, no fewer than wanted, `fewer` at least `high`.
    found = tl.sum((key > 0).to(tl.int32), 0)
    wanted = tl.minimum(found, topk)
    high = tl.max(key, 0) + 1
    low = tl.min(tl.where(key > 0, key, high), 0)
    fewer = tl.zeros([], tl.int32)
    guess = True
    while (found > wanted) & (high - low > 1):
        # By turns where a straight line meets the number wanted, and the middle.
        middle = low + (high - low) // 2
        if guess:
            share = (found - wanted).to(tl.float32) / (found - fewer).to(tl.float32)
            step = ((high - low).to(tl.float32) * share).to(tl.uint32)
            middle = low + tl.minimum(tl.maximum(step, 1), high - low - 1)
        guess = guess == 0
        above = tl.sum((key >= middle).to(tl.int32), 0)
        enough = above >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        found, fewer = tl.where(enough, above, found), tl.where(enough, fewer, above)
    greater, equal = key > low, key == low
    ties = wanted - tl.sum(greater.to(tl.int32), 0)
    # Two sums in one: both stay below 2^16.
    sums = tl.cumsum(greater.to(tl.uint32) + (equal.to(tl.uint32) << 16), 0)
    of_equal = (sums >> 16).to(tl.int32)
    chosen = greater | (equal & (of_equal <= ties))
    position = base + number
    if LEVEL > 0:
        position = tl.load(positions + row * stride + number, mask=chosen, other=0)
    to = out + (row * tl.num_programs(1) + part) * topk
    to_keys = out_keys + (row * tl.num_programs(1) + part) * topk
    keyed = done == 0
    if done:
        to = final + row * topk
        if SORTED:
            to_keys = final_keys + row * topk
            keyed = done
        if TABLE_PAGE > 0:
            entries = table + (tl.program_id(0) // next_n).to(tl.int64) * table_stride
            entry = tl.load(entries + position // TABLE_PAGE, mask=chosen, other=0)
            position = entry * TABLE_PAGE + position % TABLE_PAGE
    slot = (sums & 0xFFFF).to(tl.int32) + tl.minimum(of_equal, ties) - 1
    tl.store(to + slot, position, mask=chosen)
    tl.store(to_keys + slot, key.to(tl.int32, bitcast=True), mask=chosen & keyed)
    for first in range(0, topk, BLOCK):
        empty = first + tl.arange(0, BLOCK)
        rest = (empty >= wanted) & (empty < topk)
        tl.store(to + empty, -1, mask=rest)
        tl.store(to_keys + empty, 0, mask=rest & keyed)
