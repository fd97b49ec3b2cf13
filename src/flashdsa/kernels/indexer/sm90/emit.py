"""Where ids go, and the winners' ids of a list that is in the order of positions."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute

from flashdsa.dsl.smem import load4
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.listing import (
    before_warp,
    consumer_sync,
    warp_sums,
)
from flashdsa.kernels.indexer.sm90.memory import Ranking
from flashdsa.kernels.indexer.sm90.place import Place
from flashdsa.kernels.indexer.sm90.ranges import Part
from flashdsa.kernels.indexer.sm90.segments import Rows, row_length
from flashdsa.kernels.indexer.sm90.threshold import Threshold
from flashdsa.problem import PAGE_SIZE

PAGE_BITS = PAGE_SIZE.bit_length() - 1
ENTRIES_EACH = 4
"""Entries of a lane in one load."""
WARP_ENTRIES = ENTRIES_EACH * WARP_SIZE
WINNER_BITS = 31
"""Entries of a lane of which a register says who wins; the sign stays 0."""


class Output(NamedTuple):
    """Where ids go and what makes them."""

    topk_indices: Any  # (B, topk) int32, device memory
    block_table: Any  # (B, max_pages) int32, device memory; None: ids are positions
    num_pages: Int32
    rows: Rows


@cute.jit
def token_id(output: Output, row: Int32, position: Int32) -> Int32:
    """page * 64 + offset of a token; its position where there is no table."""
    if const_expr(output.block_table is None):
        return position
    at = Int64(row) * output.block_table.stride[0] + (position >> PAGE_BITS)
    page = (output.block_table.iterator + at).load()
    return (page << PAGE_BITS) + (position & (PAGE_SIZE - 1))


@cute.jit
def store_id(output: Output, row: Int32, place: Int32, value: Int32, plan: Any) -> None:
    """One slot of the output row."""
    (output.topk_indices.iterator + (Int64(row) * plan.topk + place)).store(value)


class Stretch(NamedTuple):
    """The list's entries that a warp takes, one behind the other, and their pages' ids."""

    first: Int32
    end: Int32
    ids: Int32  # lane i: first id of the i-th page of them


@cute.jit
def own_stretch(
    output: Output, row: Int32, part: Part, thread: Int32, plan: cutlass.Constexpr
) -> Stretch:
    """Of the calling warp; asks for the ids, which are needed when the threshold is known."""
    lane = thread % WARP_SIZE
    warps = plan.consumer_warps
    each = (part.entries + warps * WARP_ENTRIES - 1) // (warps * WARP_ENTRIES) * WARP_ENTRIES
    if part.entries < warps * WARP_ENTRIES:
        each = (part.entries + warps * PAGE_SIZE - 1) // (warps * PAGE_SIZE) * PAGE_SIZE
    first = cutlass.min(thread // WARP_SIZE * each, part.entries)
    end = cutlass.min(first + each, part.entries)
    position = part.first + ((first >> PAGE_BITS) + lane) * PAGE_SIZE
    ids = Int32(0)
    if position < part.first + end:
        ids = token_id(output, row, position)
    return Stretch(first, end, ids)


@cute.jit
def winners_at(
    ranking: Ranking, threshold: Threshold, last: Int32, index: Int32, end: Int32
) -> Int32:
    """Bit k: entry `index` + k of the list, in front of `end`, wins; with the threshold's key up to
    entry `last`."""
    winners = Int32(0)
    if index < end:
        keys = load4(ranking.keys, index // ENTRIES_EACH)
        for k in cutlass.range_constexpr(ENTRIES_EACH):
            key = Uint32(keys[k])
            if key > threshold.key or (key == threshold.key and index + k <= last):
                winners |= 1 << k
    return winners


@cute.jit
def emit_in_order(
    ranking: Ranking,
    output: Output,
    row: Int32,
    place: Place,
    part: Part,
    stretch: Stretch,
    threshold: Threshold,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """The part's entries as good as the threshold, behind those of the parts before.

    Entry i of the list is the part's i-th token. A warp takes 128 at a time, a lane four of them:
    which of all win are bits of one register.
    """
    most_blocks = plan.list_capacity // (plan.consumer_warps * WARP_ENTRIES)
    assert const_expr(ENTRIES_EACH * most_blocks <= WINNER_BITS)
    blocks = (stretch.end - stretch.first + WARP_ENTRIES - 1) // WARP_ENTRIES
    lane = thread % WARP_SIZE
    # Key 0 is that of what is no token: if it is the threshold's, all tokens win.
    last = Int32(threshold.position) - part.first if threshold.key != 0 else Int32(-1)
    winners = Int32(0)
    for block in cutlass.range(blocks, unroll=1):
        index = stretch.first + block * WARP_ENTRIES + ENTRIES_EACH * lane
        found = winners_at(ranking, threshold, last, index, stretch.end)
        winners |= found << (ENTRIES_EACH * block)
    of_warp = cute.arch.warp_redux_sync(Int32(cute.arch.popc(winners)), "add")
    sums = warp_sums(ranking, of_warp, thread, plan)
    to = threshold.first_place + before_warp(sums, thread)
    below = Int32(cute.arch.lanemask_lt())
    for block in cutlass.range(blocks, unroll=1):
        mine = to
        for k in cutlass.range_constexpr(ENTRIES_EACH):
            vote = Int32(cute.arch.vote_ballot_sync(wins(winners, k)))
            mine += Int32(cute.arch.popc(vote & below))
            to += Int32(cute.arch.popc(vote))
        index = stretch.first + block * WARP_ENTRIES + ENTRIES_EACH * lane
        page = (index >> PAGE_BITS) - (stretch.first >> PAGE_BITS)
        value = cute.arch.shuffle_sync(stretch.ids, page) + (index & (PAGE_SIZE - 1))
        for k in cutlass.range_constexpr(ENTRIES_EACH):
            if wins(winners, k):
                store_id(output, row, mine, value + k, plan)
                mine += 1
        winners = winners >> ENTRIES_EACH
    fill_rest(output, row, place, threshold.total, thread, plan)
    consumer_sync(plan)


def wins(winners: Int32, k: int) -> cutlass.Boolean:
    """Whether the caller's `k`-th entry of the next block does."""
    return (winners >> k) & 1 == 1


@cute.jit
def fill_rest(
    output: Output,
    row: Int32,
    place: Place,
    total: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """-1 behind the ids of a row that has fewer tokens in the cache than the output has room."""
    if place.part == place.parts - 1:
        for i in cutlass.range(total + thread, plan.topk, plan.consumer_threads, unroll=1):
            store_id(output, row, i, Int32(-1), plan)


@cute.jit
def emit_unscored_rows(
    output: Output, warp: Int32, warps: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Rows of at most `topk` tokens: all their tokens in order. A warp takes a row."""
    for row in cutlass.range(warp, output.rows.count, warps, unroll=1):
        length = row_length(output.rows, row)
        if length <= plan.unscored_length:
            if const_expr(output.block_table is None):
                emit_positions(output, row, length, lane, plan)
            else:
                emit_all(output, row, length, lane, plan)


@cute.jit
def emit_positions(
    output: Output, row: Int32, length: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Every position of the row, then -1."""
    for place in cutlass.range(lane, plan.topk, WARP_SIZE, unroll=4):
        store_id(output, row, place, place if place < length else Int32(-1), plan)


@cute.jit
def emit_all(
    output: Output, row: Int32, length: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Every token of the row but those of pages outside the cache, then -1."""
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    page = Int32(-1)
    if lane < pages:
        page = (
            output.block_table.iterator + (Int64(row) * output.block_table.stride[0] + lane)
        ).load()
    valid = page >= 0 and page < output.num_pages
    mask = cute.arch.vote_ballot_sync(valid)
    written = Int32(0)
    for i in cutlass.range(pages, unroll=1):
        id_ = cute.arch.shuffle_sync(page, i) * PAGE_SIZE
        tokens = cutlass.min(length - i * PAGE_SIZE, Int32(PAGE_SIZE))
        if (mask >> i) & 1 == 1:
            for offset in cutlass.range(lane, tokens, WARP_SIZE, unroll=1):
                store_id(output, row, written + offset, id_ + offset, plan)
            written += tokens
    for place in cutlass.range(written + lane, plan.topk, WARP_SIZE, unroll=1):
        store_id(output, row, place, Int32(-1), plan)
