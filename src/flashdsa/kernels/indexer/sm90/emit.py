"""Where ids go, and the winners' ids of a list that is in the order of positions."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute

from flashdsa.kernels.indexer.sm90.bins import accepts
from flashdsa.kernels.indexer.sm90.deal import Place
from flashdsa.kernels.indexer.sm90.listing import consumer_sync, four_at
from flashdsa.kernels.indexer.sm90.memory import SCRATCH_WARP_SUMS, Ranking
from flashdsa.kernels.indexer.sm90.plan import WARP_SIZE
from flashdsa.kernels.indexer.sm90.segments import Rows, row_length
from flashdsa.kernels.indexer.sm90.threshold import Part, Threshold
from flashdsa.problem import PAGE_SIZE

PAGE_BITS = PAGE_SIZE.bit_length() - 1
ENTRIES_EACH = 4
"""Entries of a lane in one load."""
WARP_ENTRIES = ENTRIES_EACH * WARP_SIZE


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
def votes_at(
    ranking: Ranking, part: Part, stretch: Stretch, threshold: Threshold, at: Int32, lane: Int32
) -> tuple[Int32, ...]:
    """Vote k: the lanes whose k-th entry from `at` on wins."""
    first = at + ENTRIES_EACH * lane
    inside = first < stretch.end
    quad = (first if inside else stretch.first) // ENTRIES_EACH
    keys = four_at(ranking.keys, quad)
    positions = four_at(ranking.positions, quad)
    votes = [Int32(0)] * ENTRIES_EACH
    for k in cutlass.range_constexpr(ENTRIES_EACH):
        wins = inside and accepts(
            Uint32(keys[k]), Uint32(positions[k]), threshold.key, threshold.position
        )
        votes[k] = Int32(cute.arch.vote_ballot_sync(wins))
    return tuple(votes)


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

    Entry i of the list is the part's i-th token. A warp takes 128 at a time, a lane four of them.
    """
    lane = thread % WARP_SIZE
    warp = thread // WARP_SIZE
    count = Int32(0)
    for at in cutlass.range(stretch.first, stretch.end, WARP_ENTRIES, unroll=1):
        for vote in votes_at(ranking, part, stretch, threshold, at, lane):
            count += Int32(cute.arch.popc(vote))
    if lane == 0:
        ranking.scratch[SCRATCH_WARP_SUMS + warp] = count
    consumer_sync(plan)
    before = Int32(0)
    if lane < warp:
        before = ranking.scratch[SCRATCH_WARP_SUMS + lane]
    to = threshold.first_place + cute.arch.warp_redux_sync(before, "add")
    below = Int32(cute.arch.lanemask_lt())
    for at in cutlass.range(stretch.first, stretch.end, WARP_ENTRIES, unroll=1):
        votes = votes_at(ranking, part, stretch, threshold, at, lane)
        mine = to
        for vote in votes:
            mine += Int32(cute.arch.popc(vote & below))
            to += Int32(cute.arch.popc(vote))
        index = at + ENTRIES_EACH * lane
        page = (index >> PAGE_BITS) - (stretch.first >> PAGE_BITS)
        value = cute.arch.shuffle_sync(stretch.ids, page) + (index & (PAGE_SIZE - 1))
        for k in cutlass.range_constexpr(ENTRIES_EACH):
            if (votes[k] >> lane) & 1 == 1:
                store_id(output, row, mine, value + k, plan)
                mine += 1
    fill_rest(output, row, place, threshold.total, thread, plan)
    consumer_sync(plan)


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
