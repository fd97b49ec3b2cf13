"""The winners' ids in ascending position, of a list that is in the order of positions."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32, const_expr, cute

from flashdsa.dsl.smem import load4
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import before_warp, consumer_sync, warp_sums
from flashdsa.kernels.indexer.emit.output import PAGE_BITS, Output, fill_rest, store_id, token_id
from flashdsa.kernels.indexer.schedule.coord import Coord
from flashdsa.kernels.indexer.select.ranges import Part
from flashdsa.kernels.indexer.select.threshold import Threshold
from flashdsa.kernels.indexer.smem_views import SelectBuffers
from flashdsa.problem import PAGE_SIZE

ENTRIES_EACH = 4
"""Entries of a lane in one load."""
WARP_ENTRIES = ENTRIES_EACH * WARP_SIZE
WINNER_BITS = 31
"""Entries of a lane whose winners one register names; its sign bit stays 0."""


class WarpSpan(NamedTuple):
    """The neighbouring entries of the list that a warp takes, and their pages' ids."""

    first: Int32
    end: Int32
    ids: Int32  # lane i: first id of the i-th page of them


@cute.jit
def own_span(
    output: Output, row: Int32, part: Part, thread: Int32, plan: cutlass.Constexpr
) -> WarpSpan:
    """The calling warp's span; asks for the ids, which are needed when the threshold is known."""
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
    return WarpSpan(first, end, ids)


@cute.jit
def winners_at(
    select: SelectBuffers, threshold: Threshold, last: Int32, index: Int32, end: Int32
) -> Int32:
    """Bit k: entry `index` + k of the list, before `end`, wins; those with the threshold's key win
    up to entry `last`."""
    winners = Int32(0)
    if index < end:
        keys = load4(select.keys, index // ENTRIES_EACH)
        for k in cutlass.range_constexpr(ENTRIES_EACH):
            key = Uint32(keys[k])
            if key > threshold.key or (key == threshold.key and index + k <= last):
                winners |= 1 << k
    return winners


@cute.jit
def emit_in_order(
    select: SelectBuffers,
    output: Output,
    row: Int32,
    coord: Coord,
    part: Part,
    span: WarpSpan,
    threshold: Threshold,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Write the part's entries as good as the threshold, after those of the previous parts.

    Entry i of the list is the part's i-th token. A warp takes 128 at a time, a lane four of them;
    the bits of one register say which of the lane's entries win.
    """
    most_blocks = plan.list_capacity // (plan.consumer_warps * WARP_ENTRIES)
    assert const_expr(ENTRIES_EACH * most_blocks <= WINNER_BITS)
    blocks = (span.end - span.first + WARP_ENTRIES - 1) // WARP_ENTRIES
    lane = thread % WARP_SIZE
    # No token has key 0: if the threshold has it, all tokens win.
    last = Int32(threshold.position) - part.first if threshold.key != 0 else Int32(-1)
    winners = Int32(0)
    for block in cutlass.range(blocks, unroll=1):
        index = span.first + block * WARP_ENTRIES + ENTRIES_EACH * lane
        found = winners_at(select, threshold, last, index, span.end)
        winners |= found << (ENTRIES_EACH * block)
    of_warp = cute.arch.warp_redux_sync(Int32(cute.arch.popc(winners)), "add")
    sums = warp_sums(select, of_warp, thread, plan)
    to = threshold.first_out_index + before_warp(sums, thread)
    below = Int32(cute.arch.lanemask_lt())
    for block in cutlass.range(blocks, unroll=1):
        mine = to
        for k in cutlass.range_constexpr(ENTRIES_EACH):
            vote = Int32(cute.arch.vote_ballot_sync(wins(winners, k)))
            mine += Int32(cute.arch.popc(vote & below))
            to += Int32(cute.arch.popc(vote))
        index = span.first + block * WARP_ENTRIES + ENTRIES_EACH * lane
        page = (index >> PAGE_BITS) - (span.first >> PAGE_BITS)
        value = cute.arch.shuffle_sync(span.ids, page) + (index & (PAGE_SIZE - 1))
        for k in cutlass.range_constexpr(ENTRIES_EACH):
            if wins(winners, k):
                store_id(output, row, mine, value + k, plan)
                mine += 1
        winners = winners >> ENTRIES_EACH
    fill_rest(output, row, coord, threshold.total, thread, plan)
    consumer_sync(plan)


def wins(winners: Int32, k: int) -> cutlass.Boolean:
    """Whether the caller's `k`-th entry of the next block wins."""
    return (winners >> k) & 1 == 1
