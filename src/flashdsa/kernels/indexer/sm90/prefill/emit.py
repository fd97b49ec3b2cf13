"""Marked entries in their order: their rows to the output, or they to the log.

Every warp knows from the masks how many come before its own, so none waits for another.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.smem import load4
from flashdsa.dsl.warp import prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.entries import (
    INVALID,
    WORDS_EACH,
    Entries,
    load_chunk,
    load_words,
)
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK, CHUNK_MASKS
from flashdsa.kernels.indexer.sm90.prefill.team import Team, number_of_ones
from flashdsa.kernels.indexer.sm90.prefill.tiles import Ranges, Tile, range_of

SPARSE = CHUNK // 8
"""Marked entries of a chunk up to which a lane takes all those of a word. With more, what lanes
store at the same time lies far apart."""
STEPS = 4
"""Bits of a word between two looks whether any lane has more."""
TOGETHER = 8
"""Loads of a lane that are under way at the same time."""


class Source(NamedTuple):
    """Entries, and which rows they are of."""

    entries: Entries
    rows: Any  # pointer to Int32: rows of the log's entries
    first_row: Int32  # of the segment's first entry


def store_if(taken: Int32, pointer: Any, value: Int32) -> None:
    """Store a word if `taken` is not 0, by a predicate and no branch."""
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; @p st.global.b32 [{$r1}], {$r2}; }",
        read_only_args=[taken, pointer, value],
    )


def load_if(taken: Int32, pointer: Any) -> Int32:
    """A word if `taken` is not 0, else 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; mov.b32 {$w0}, 0; "
        "@p ld.global.b32 {$w0}, [{$r1}]; }",
        write_only_types=[Int32],
        read_only_args=[taken, pointer],
    )


@cute.jit
def write_rows(
    team: Team, source: Source, to: Any, scores: Any, topk: Int32, plan: cutlass.Constexpr
) -> None:
    """Rows of all marked entries, topk at most, then -1. Ends not synced.

    Args:
        to: pointer to the query's row of the output. scores: to that of their scores, or None.
    """
    entries = source.entries
    share = (entries.count + plan.team_warps - 1) // plan.team_warps
    begin = team.member * share
    end = cutlass.min(begin + share, entries.count)
    at = number_of_ones(team, Int32(0), begin * CHUNK_MASKS)
    of_log = cutlass.min(cutlass.max(entries.logged, begin), end)
    first = write_log(team, source, to, scores, begin, of_log, at)
    at = write_segment(team, source, to, of_log, end, first)
    if cutlass.const_expr(scores is not None):
        cute.arch.sync_warp()  # lanes read what others wrote
        copy_scores(team, source, to, scores, first, at)
    if team.member == plan.team_warps - 1:
        for i in cutlass.range(at + team.lane, topk, WARP_SIZE, unroll=1):
            (to + i).store(Int32(-1))


class Numbered(NamedTuple):
    """The marked entries of a chunk, a lane a word, as counting bits is slow."""

    mask: Int32  # of this lane's word
    ones: Int32  # in it
    through: Int32  # in the words up to it
    total: Int32  # in the chunk


@cute.jit
def number_chunk(team: Team, chunk: Int32) -> Numbered:
    """All lanes call."""
    mask = team.masks[chunk * CHUNK_MASKS + team.lane]
    ones = Int32(cute.arch.popc(mask))
    through = prefix_sum(ones, team.lane)
    return Numbered(mask, ones, through, cute.arch.shuffle_sync(through, WARP_SIZE - 1))


@cute.jit
def place_words(team: Team, chunk: Int32, numbered: Numbered, at: Int32) -> None:
    """Where the first marked entry of each word goes, into the place of its maybes, if the chunk's
    first one goes to `at`."""
    team.maybes[chunk * CHUNK_MASKS + team.lane] = at + numbered.through - numbered.ones
    cute.arch.sync_warp()  # all lanes read all of them


@cute.jit
def write_log(
    team: Team, source: Source, to: Any, scores: Any, begin: Int32, end: Int32, at: Int32
) -> Int32:
    """The same of some chunks of the log, the first row to place `at`; the place behind the last
    one."""
    for chunk in cutlass.range(begin, end, unroll=1):
        numbered = number_chunk(team, chunk)
        place_words(team, chunk, numbered, at)
        rows = load_marked(team, chunk, source.rows + (chunk * CHUNK + team.lane))
        store_marked(team, chunk, to, rows)
        if cutlass.const_expr(scores is not None):
            words = load_words(source.entries.words + (chunk * CHUNK + team.lane))
            store_marked(team, chunk, scores, words)
        at += numbered.total
    return at


@cute.jit
def write_segment(
    team: Team, source: Source, to: Any, begin: Int32, end: Int32, at: Int32
) -> Int32:
    """The same of some chunks of the segment: where few are marked a lane takes those of a word,
    else a word's lanes take theirs."""
    for chunk in cutlass.range(begin, end, unroll=1):
        numbered = number_chunk(team, chunk)
        row = source.first_row + (chunk - source.entries.logged) * CHUNK
        if numbered.total <= SPARSE:
            last = to + (at + numbered.through - 1)
            rest, own = numbered.mask, row + team.lane * WARP_SIZE
            most = cute.arch.warp_redux_sync(numbered.ones, "max")
            for _ in cutlass.range((most + STEPS - 1) // STEPS, unroll=1):
                for step in cutlass.range_constexpr(STEPS):
                    rest = store_highest(rest, last - step, own)
                last = last - STEPS
        else:
            place_words(team, chunk, numbered, at)
            rows = cute.make_rmem_tensor(WORDS_EACH, Int32)
            for i in cutlass.range_constexpr(WORDS_EACH):
                rows[i] = row + team.lane + WARP_SIZE * i
            store_marked(team, chunk, to, rows)
        at += numbered.total
    return at


def store_highest(rest: Int32, pointer: Any, first: Int32) -> Int32:
    """Store `first` + the place of the highest bit, if there is one; the bits below it."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 bit, row; setp.ne.s32 p, {$r0}, 0; bfind.u32 bit, {$r0}; "
        "add.s32 row, bit, {$r2}; @p st.global.b32 [{$r1}], row; shl.b32 bit, 1, bit; "
        "not.b32 bit, bit; and.b32 {$w0}, {$r0}, bit; }",
        write_only_types=[Int32],
        read_only_args=[rest, pointer, first],
    )


@cute.jit
def load_marked(team: Team, chunk: Int32, at: Any) -> cute.Tensor:
    """What a chunk's marked entries have, of this lane; else 0, as rows behind the last entry were
    never written."""
    own = Int32(1) << team.lane
    mine = cute.make_rmem_tensor(WORDS_EACH, Int32)
    for four in cutlass.range_constexpr(CHUNK_MASKS // 4):
        masks = load4(team.masks, chunk * (CHUNK_MASKS // 4) + four)
        for i in cutlass.range_constexpr(4):
            place = 4 * four + i
            mine[place] = load_if(masks[i] & own, at + WARP_SIZE * place)
    return mine


@cute.jit
def store_marked(team: Team, chunk: Int32, to: Any, words: cute.Tensor) -> None:
    """What a chunk's marked entries have, to their places."""
    below, own = Int32(cute.arch.lanemask_lt()), Int32(1) << team.lane
    for four in cutlass.range_constexpr(CHUNK_MASKS // 4):
        masks = load4(team.masks, chunk * (CHUNK_MASKS // 4) + four)
        firsts = load4(team.maybes, chunk * (CHUNK_MASKS // 4) + four)
        for i in cutlass.range_constexpr(4):
            place = firsts[i] + Int32(cute.arch.popc(masks[i] & below))
            store_if(masks[i] & own, to + place, words[4 * four + i])


@cute.jit
def append(team: Team, source: Source, logged: Int32, plan: cutlass.Constexpr) -> Int32:
    """The segment's marked entries behind the first `logged` of the log, which has room, and no
    scores behind them up to a chunk's end; how many there are then. Ends not synced."""
    entries = source.entries
    of_segment = entries.count - entries.logged
    share = (of_segment + plan.team_warps - 1) // plan.team_warps
    first = entries.logged + team.member * share
    at = logged + number_of_ones(team, entries.logged * CHUNK_MASKS, first * CHUNK_MASKS)
    end = cutlass.min(first + share, entries.count)
    behind = write_segment(team, source, source.rows, first, end, at)
    cute.arch.sync_warp()  # lanes read what others wrote
    copy_scores(team, source, source.rows, entries.words, at, behind)
    total = logged + number_of_ones(team, entries.logged * CHUNK_MASKS, entries.count * CHUNK_MASKS)
    if team.member == plan.team_warps - 1:
        padded = (total + CHUNK - 1) // CHUNK * CHUNK
        for i in cutlass.range(total + team.lane, padded, WARP_SIZE, unroll=1):
            (entries.words + i).store(Int32(INVALID))
    return total


@cute.jit
def copy_scores(team: Team, source: Source, rows: Any, to: Any, begin: Int32, end: Int32) -> None:
    """The scores of rows `begin` to `end` - 1 of a list, which are of the segment, to the same
    places."""
    segment = source.entries.words + source.entries.segment
    for first in cutlass.range(begin + team.lane, end + team.lane, TOGETHER * WARP_SIZE, unroll=1):
        places, taken, words = [], [], []
        for i in cutlass.range_constexpr(TOGETHER):
            place = first + WARP_SIZE * i
            places.append(place)
            taken.append(Int32(1) if place < end else Int32(0))
        chosen = [load_if(taken[i], rows + places[i]) for i in range(TOGETHER)]
        for i in cutlass.range_constexpr(TOGETHER):
            words.append(load_if(taken[i], segment + (chosen[i] - source.first_row)))
        for i in cutlass.range_constexpr(TOGETHER):
            store_if(taken[i], to + places[i], words[i])


@cute.jit
def compact(team: Team, source: Source) -> None:
    """Only the log's marked entries stay, by the team's first warp. Ends not synced."""
    if team.member == 0:
        at = Int32(0)
        for chunk in cutlass.range(source.entries.logged, unroll=1):
            words = load_chunk(source.entries, chunk, team.lane)
            rows = load_marked(team, chunk, source.rows + (chunk * CHUNK + team.lane))
            cute.arch.sync_warp()  # all lanes have read what is overwritten from here on
            at = keep_chunk(team, source, chunk, words, rows, at)
            cute.arch.sync_warp()


@cute.jit
def keep_chunk(
    team: Team, source: Source, chunk: Int32, words: cute.Tensor, rows: cute.Tensor, at: Int32
) -> Int32:
    """A chunk's marked entries to the log, from place `at` on; the place behind the last one."""
    below, own = Int32(cute.arch.lanemask_lt()), Int32(1) << team.lane
    numbered = number_chunk(team, chunk)
    place_words(team, chunk, numbered, at)
    for four in cutlass.range_constexpr(CHUNK_MASKS // 4):
        masks = load4(team.masks, chunk * (CHUNK_MASKS // 4) + four)
        firsts = load4(team.maybes, chunk * (CHUNK_MASKS // 4) + four)
        for i in cutlass.range_constexpr(4):
            place = firsts[i] + Int32(cute.arch.popc(masks[i] & below))
            taken = masks[i] & own
            store_if(taken, source.entries.words + place, words[4 * four + i])
            store_if(taken, source.rows + place, rows[4 * four + i])
    return at + numbered.total


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
