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
    first_word,
    load_chunk,
    load_words,
)
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK, CHUNK_MASKS
from flashdsa.kernels.indexer.sm90.prefill.team import Team, number_of_ones
from flashdsa.kernels.indexer.sm90.prefill.tiles import Ranges, Tile, range_of


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
def write_rows(team: Team, source: Source, to: Any, topk: Int32, plan: cutlass.Constexpr) -> None:
    """Rows of all marked entries, topk at most, then -1. Ends not synced.

    Args:
        to: pointer to the query's row of the output.
    """
    entries = source.entries
    share = (entries.count + plan.team_warps - 1) // plan.team_warps
    begin = team.member * share
    end = cutlass.min(begin + share, entries.count)
    at = number_of_ones(team, Int32(0), begin * CHUNK_MASKS)
    of_log = cutlass.min(cutlass.max(entries.logged, begin), end)
    at = write_chunks(team, source, to, begin, of_log, at, True)
    at = write_chunks(team, source, to, of_log, end, at, False)
    if team.member == plan.team_warps - 1:
        for i in cutlass.range(at + team.lane, topk, WARP_SIZE, unroll=1):
            (to + i).store(Int32(-1))


@cute.jit
def number_chunk(team: Team, chunk: Int32, at: Int32) -> Int32:
    """Where the first marked entry of each word of a chunk goes, into the place of its maybes, if
    the chunk's first one goes to `at`; the place behind the last one. A lane a word, as counting
    bits is slow."""
    word = chunk * CHUNK_MASKS + team.lane
    ones = Int32(cute.arch.popc(team.masks[word]))
    through = prefix_sum(ones, team.lane)
    team.maybes[word] = at + through - ones
    cute.arch.sync_warp()  # all lanes read all of them
    return at + cute.arch.shuffle_sync(through, WARP_SIZE - 1)


@cute.jit
def write_chunks(
    team: Team,
    source: Source,
    to: Any,
    begin: Int32,
    end: Int32,
    at: Int32,
    of_log: cutlass.Constexpr,
) -> Int32:
    """The same of some chunks, the first row to place `at`; the place behind the last one."""
    lane, below = team.lane, Int32(cute.arch.lanemask_lt())
    own = Int32(1) << lane
    for chunk in cutlass.range(begin, end, unroll=1):
        at = number_chunk(team, chunk, at)
        row = source.first_row + (chunk - source.entries.logged) * CHUNK + lane
        rows = cute.make_rmem_tensor(WORDS_EACH, Int32)
        if cutlass.const_expr(of_log):
            rows = load_words(source.rows + (chunk * CHUNK + lane))
        else:
            for i in cutlass.range_constexpr(WORDS_EACH):
                rows[i] = row + WARP_SIZE * i
        for four in cutlass.range_constexpr(CHUNK_MASKS // 4):
            masks = load4(team.masks, chunk * (CHUNK_MASKS // 4) + four)
            firsts = load4(team.maybes, chunk * (CHUNK_MASKS // 4) + four)
            for i in cutlass.range_constexpr(4):
                place = firsts[i] + Int32(cute.arch.popc(masks[i] & below))
                store_if(masks[i] & own, to + place, rows[4 * four + i])
    return at


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
    for chunk in cutlass.range(first, end, unroll=1):
        from_ = entries.words + (first_word(entries, chunk) + team.lane)
        words = cute.make_rmem_tensor(WORDS_EACH, Int32)
        own = Int32(1) << team.lane
        for four in cutlass.range_constexpr(CHUNK_MASKS // 4):
            masks = load4(team.masks, chunk * (CHUNK_MASKS // 4) + four)
            for i in cutlass.range_constexpr(4):
                at_word = from_ + (4 * four + i) * WARP_SIZE
                words[4 * four + i] = load_if(masks[i] & own, at_word)
        row = source.first_row + (chunk - entries.logged) * CHUNK + team.lane
        rows = cute.make_rmem_tensor(WORDS_EACH, Int32)
        for i in cutlass.range_constexpr(WORDS_EACH):
            rows[i] = row + WARP_SIZE * i
        at = keep_chunk(team, source, chunk, words, rows, at)
    total = logged + number_of_ones(team, entries.logged * CHUNK_MASKS, entries.count * CHUNK_MASKS)
    if team.member == plan.team_warps - 1:
        padded = (total + CHUNK - 1) // CHUNK * CHUNK
        for i in cutlass.range(total + team.lane, padded, WARP_SIZE, unroll=1):
            (entries.words + i).store(Int32(INVALID))
    return total


@cute.jit
def compact(team: Team, source: Source) -> None:
    """Only the log's marked entries stay, by the team's first warp. Ends not synced."""
    if team.member == 0:
        at = Int32(0)
        for chunk in cutlass.range(source.entries.logged, unroll=1):
            words = load_chunk(source.entries, chunk, team.lane)
            rows = load_words(source.rows + (chunk * CHUNK + team.lane))
            cute.arch.sync_warp()  # all lanes have read what is overwritten from here on
            at = keep_chunk(team, source, chunk, words, rows, at)
            cute.arch.sync_warp()


@cute.jit
def keep_chunk(
    team: Team, source: Source, chunk: Int32, words: cute.Tensor, rows: cute.Tensor, at: Int32
) -> Int32:
    """A chunk's marked entries to the log, from place `at` on; the place behind the last one."""
    below, own = Int32(cute.arch.lanemask_lt()), Int32(1) << team.lane
    behind = number_chunk(team, chunk, at)
    for four in cutlass.range_constexpr(CHUNK_MASKS // 4):
        masks = load4(team.masks, chunk * (CHUNK_MASKS // 4) + four)
        firsts = load4(team.maybes, chunk * (CHUNK_MASKS // 4) + four)
        for i in cutlass.range_constexpr(4):
            place = firsts[i] + Int32(cute.arch.popc(masks[i] & below))
            taken = masks[i] & own
            store_if(taken, source.entries.words + place, words[4 * four + i])
            store_if(taken, source.rows + place, rows[4 * four + i])
    return behind


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
