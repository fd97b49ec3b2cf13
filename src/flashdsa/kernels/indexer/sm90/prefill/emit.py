"""The winners of a query in ascending row: to the output, and to the next segment's entries.

Two warps of a team share a query: one writes from the front on, the other from the back, so that
neither needs to know how many winners the other one has. Where equal keys are cut, one warp does
all, in order.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.entries import (
    INVALID,
    VECTOR,
    VECTORS,
    key_of,
    load_chunk,
)
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK, MAX_TOPK
from flashdsa.kernels.indexer.sm90.prefill.rank import Team, Threshold, team_sync
from flashdsa.kernels.indexer.sm90.prefill.tiles import Ranges, Tile, range_of

BEST_CHUNKS = MAX_TOPK // CHUNK
"""Of a query's best entries so far, before those of the segment."""


class Winners(NamedTuple):
    """Where they come from and go to."""

    words: Any  # pointer to the query's entries
    rows: Any  # pointer to the query's row of the output
    first_row: Int32  # of the key whose entry is the segment's first
    count: Int32
    topk: Int32
    last: cutlass.Boolean  # no segment follows
    threshold: Threshold


class Place(NamedTuple):
    """How far a warp is."""

    to: Int32  # winners before the next block; from the back: behind it
    equal: Int32  # entries with the threshold's key that may still win


def store_if(taken: Int32, pointer: Any, value: Int32) -> None:
    """Store a word if `taken` is not 0, by a predicate and no branch."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; @p st.global.b32 [{$r1}], {$r2}; }",
        read_only_args=[taken, pointer, value],
    )


@cute.jit
def emit_chunk(
    winners: Winners,
    chunk: Int32,
    place: Place,
    lane: Int32,
    of_best: cutlass.Constexpr,
    backward: cutlass.Constexpr,
) -> Place:
    """The winners of 512 entries.

    Args:
        of_best: the entries are best ones of earlier segments: their rows are in the output, which
            is overwritten behind what has been read. backward: from the last entry to the first.
    """
    below = Int32(cute.arch.lanemask_lt())
    to, equal = place
    key = winners.threshold.key
    mine = load_chunk(winners.words, chunk, lane)
    for turn in cutlass.range_constexpr(VECTORS):
        v = VECTORS - 1 - turn if backward else turn
        entry = chunk * CHUNK + v * (VECTOR * WARP_SIZE) + VECTOR * lane
        row = winners.first_row + (entry - MAX_TOPK)
        rows = [row + i for i in range(VECTOR)]
        if cutlass.const_expr(of_best):
            rows = [Int32(0) for _ in range(VECTOR)]
            for i in cutlass.range_constexpr(VECTOR):
                if entry + i < winners.topk:
                    rows[i] = (winners.rows + (entry + i)).load()
            cute.arch.sync_warp()  # all lanes have read what is overwritten from here on
        takes = [key_of(mine[VECTOR * v + i]) >= key for i in range(VECTOR)]
        if winners.threshold.cuts:
            for i in cutlass.range_constexpr(VECTOR):
                takes[i] = key_of(mine[VECTOR * v + i]) > key
            ties = [key_of(mine[VECTOR * v + i]) == key for i in range(VECTOR)]
            votes = [Int32(cute.arch.vote_ballot_sync(ties[i])) for i in range(VECTOR)]
            before = Int32(0)
            for i in cutlass.range_constexpr(VECTOR):
                before += Int32(cute.arch.popc(votes[i] & below))
            for i in cutlass.range_constexpr(VECTOR):
                if ties[i]:
                    takes[i] = before < equal
                    before += 1
            for i in cutlass.range_constexpr(VECTOR):
                equal -= Int32(cute.arch.popc(votes[i]))
        chosen = [Int32(cute.arch.vote_ballot_sync(takes[i])) for i in range(VECTOR)]
        total, at = Int32(0), Int32(0)
        for i in cutlass.range_constexpr(VECTOR):
            total += Int32(cute.arch.popc(chosen[i]))
            at += Int32(cute.arch.popc(chosen[i] & below))
        if cutlass.const_expr(backward):
            to -= total
        at += to
        for i in cutlass.range_constexpr(VECTOR):
            taken = Int32(1) if takes[i] else Int32(0)
            store_if(taken, winners.rows + at, rows[i])
            if not winners.last:
                store_if(taken, winners.words + at, mine[VECTOR * v + i])
            at += taken
        if cutlass.const_expr(not backward):
            to += total
    return Place(to, equal)


@cute.jit
def emit(
    team: Team, winners: Winners, end_chunk: Int32, first: cutlass.Boolean, plan: cutlass.Constexpr
) -> None:
    """All winners; then -1, or entries that never win, in the places behind them.

    Args:
        end_chunk: behind the segment's last chunk. first: there are no best entries yet.
    """
    lane = team.lane
    place = Place(Int32(0), winners.threshold.equal)
    if not first:
        if team.member == 0:
            for chunk in cutlass.range(BEST_CHUNKS, unroll=1):
                place = emit_chunk(winners, chunk, place, lane, True, False)
        team_sync(team, plan)  # the best entries have been read: their places may be written
    middle = end_chunk
    if cutlass.const_expr(plan.team_warps > 1):
        if not winners.threshold.cuts:
            middle = BEST_CHUNKS + (end_chunk - BEST_CHUNKS) // 2
    if team.member == 0:
        for chunk in cutlass.range(Int32(BEST_CHUNKS), middle, unroll=1):
            place = emit_chunk(winners, chunk, place, lane, False, False)
        for i in cutlass.range(winners.count + lane, winners.topk, WARP_SIZE, unroll=1):
            (winners.rows + i).store(Int32(-1))
        if not winners.last:
            for i in cutlass.range(winners.count + lane, MAX_TOPK, WARP_SIZE, unroll=1):
                (winners.words + i).store(Int32(INVALID))
    else:
        place = Place(winners.count, Int32(0))
        for turn in cutlass.range(end_chunk - middle, unroll=1):
            place = emit_chunk(winners, end_chunk - 1 - turn, place, lane, False, True)


@cute.jit
def emit_unscored(
    ranges: Ranges, tile: Tile, rows: cute.Tensor, warp: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """A tile whose queries see at most topk keys each: all of them, then -1."""
    for i in cutlass.range(warp, plan.tile_queries, plan.select_warps, unroll=1):
        query = tile.first_query + i
        if query < ranges.num_queries:
            start, end = range_of(ranges, query)
            to = row_of(rows, query, ranges.topk)
            for at in cutlass.range(lane, ranges.topk, WARP_SIZE, unroll=4):
                value = start + at
                if value >= end:
                    value = Int32(-1)
                (to + at).store(value)


def row_of(rows: cute.Tensor, query: Int32, topk: Int32) -> Any:
    """Pointer to a query's row of the output."""
    return rows.iterator + cutlass.Int64(query) * topk
