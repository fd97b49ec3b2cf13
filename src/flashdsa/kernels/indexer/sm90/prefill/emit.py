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
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK, CHUNK_MASKS, PLACE_BYTES
from flashdsa.kernels.indexer.sm90.prefill.team import Team, number_of_ones, team_sync
from flashdsa.kernels.indexer.sm90.prefill.tiles import Ranges, Tile, range_of

STEPS = 4
"""Bits of a word between two looks whether any lane has more."""
TOGETHER = 8
"""Loads of a lane that are under way at the same time."""
TOTAL_BITS = 16
"""Two counts of a chunk's entries share a word, so that one prefix sum makes both."""
TOTAL_MASK = (1 << TOTAL_BITS) - 1


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
    team: Team,
    source: Source,
    stage: Int32,
    to: Any,
    scores: Any,
    best: Int32,
    topk: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Rows of all marked entries, `best` of them, then -1 up to topk. Ends not synced.

    Args:
        stage: shared memory address of room for MAX_TOPK places in the segment.
        to: pointer to the query's row of the output. scores: to that of their scores, or None.
    """
    entries = source.entries
    begin, end = share_of(team, Int32(0), entries.count, plan)
    at = number_of_ones(team, Int32(0), begin * CHUNK_MASKS)
    of_log = cutlass.min(cutlass.max(entries.logged, begin), end)
    at = write_log(team, source, to, scores, begin, of_log, at)
    own = (of_log - entries.logged) * CHUNK
    write_places(team, of_log, end, at, stage, own, True)
    team_sync(team, plan)  # all places are staged
    first = number_of_ones(team, Int32(0), entries.logged * CHUNK_MASKS)
    write_staged(team, source, stage, to, first, best, topk, plan)
    if cutlass.const_expr(scores is not None):
        team_sync(team, plan)  # warps read what others wrote
        begin, end = share_of(team, first, best, plan)
        copy_scores(team, source, to, scores, begin, end)
        own = team.member * WARP_SIZE + team.lane
        for i in cutlass.range(best + own, topk, plan.team_warps * WARP_SIZE, unroll=1):
            (scores + i).store(Int32(INVALID))


def share_of(team: Team, begin: Int32, end: Int32, plan: Any) -> tuple[Int32, Int32]:
    """(first, behind the last one) that this warp takes of `begin` to `end` - 1."""
    share = (end - begin + plan.team_warps - 1) // plan.team_warps
    first = begin + team.member * share
    return first, cutlass.min(first + share, end)


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
def write_places(
    team: Team,
    begin: Int32,
    end: Int32,
    at: Int32,
    to: Any,
    first: Int32,
    staged: cutlass.Constexpr,
) -> Int32:
    """`first` + its place in the chunks `begin` to `end` - 1 of each of their marked entries, the
    first one to place `at`; the place behind the last one. Two chunks at a time, a lane a word of
    either.

    Args:
        to: with `staged` an address in shared memory, of 16-bit words; else a pointer to Int32.
    """
    write = store_highest_shared if staged else store_highest
    for chunk in cutlass.range(begin, end, 2, unroll=1):
        one, two = team.masks[chunk * CHUNK_MASKS + team.lane], Int32(0)
        if chunk + 1 < end:
            two = team.masks[(chunk + 1) * CHUNK_MASKS + team.lane]
        ones, twos = Int32(cute.arch.popc(one)), Int32(cute.arch.popc(two))
        through = prefix_sum(ones | twos << TOTAL_BITS, team.lane)
        total = cute.arch.shuffle_sync(through, WARP_SIZE - 1)
        most = cute.arch.warp_redux_sync(cutlass.max(ones, twos), "max")
        last = at + (through & TOTAL_MASK) - 1
        at += total & TOTAL_MASK
        last_two = at + (through >> TOTAL_BITS) - 1
        at += total >> TOTAL_BITS
        size = PLACE_BYTES if staged else 1
        ends, ends_two = to + last * size, to + last_two * size
        word = first + (chunk - begin) * CHUNK + team.lane * WARP_SIZE
        for _ in cutlass.range((most + STEPS - 1) // STEPS, unroll=1):
            for step in cutlass.range_constexpr(STEPS):
                one = write(one, ends - step * size, word)
                two = write(two, ends_two - step * size, word + CHUNK)
            ends = ends - STEPS * size
            ends_two = ends_two - STEPS * size
    return at


def store_highest(rest: Int32, pointer: Any, first: Int32) -> Int32:
    """Store `first` + the place of the highest bit, if there is one; the bits below it."""
    return _highest(rest, pointer, first, "@p st.global.b32 [{$r1}], row;")


def store_highest_shared(rest: Int32, address: Any, first: Int32) -> Int32:
    """The same to 16 bits of shared memory."""
    return _highest(rest, address, first, "cvt.u16.u32 half, row; @p st.shared.b16 [{$r1}], half;")


def _highest(rest: Int32, to: Any, first: Int32, store: str) -> Int32:
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 bit, row; .reg .b16 half; setp.ne.s32 p, {$r0}, 0; "
        f"bfind.u32 bit, {{$r0}}; add.s32 row, bit, {{$r2}}; {store} shl.b32 bit, 1, bit; "
        "not.b32 bit, bit; and.b32 {$w0}, {$r0}, bit; }",
        write_only_types=[Int32],
        read_only_args=[rest, to, first],
    )


@cute.jit
def write_staged(
    team: Team,
    source: Source,
    stage: Int32,
    to: Any,
    begin: Int32,
    end: Int32,
    topk: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Rows of the staged places `begin` to `end` - 1, then -1 up to topk, by all warps of the team.
    A lane takes four that fill 16 bytes of the output."""
    ahead = Int32(to.toint() >> 2) & 3  # words of 16 bytes that are in front of the output's first
    own = team.member * WARP_SIZE + team.lane
    first, last = (begin + ahead) // 4 + own, (topk + ahead + 3) // 4
    for four in cutlass.range(first, last, plan.team_warps * WARP_SIZE, unroll=1):
        place = four * 4 - ahead
        address = stage + place * PLACE_BYTES
        if place >= begin and place + 4 <= end:
            store_rows(address, to + place, source.first_row)
        else:
            for i in cutlass.range_constexpr(4):
                if place + i >= begin and place + i < topk:
                    row = Int32(-1)
                    if place + i < end:
                        row = load_place(address + i * PLACE_BYTES) + source.first_row
                    (to + (place + i)).store(row)


def store_rows(address: Int32, to: Any, first_row: Int32) -> None:
    """Four staged places as rows to 16 bytes."""
    rows = [load_place(address + i * PLACE_BYTES) + first_row for i in range(4)]
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };", read_only_args=[to, *rows]
    )


def load_place(address: Int32) -> Int32:
    """16 bits of shared memory."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 half; ld.shared.u16 half, [{$r0}]; cvt.u32.u16 {$w0}, half; }",
        write_only_types=[Int32],
        read_only_args=[address],
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
    first, end = share_of(team, entries.logged, entries.count, plan)
    at = logged + number_of_ones(team, entries.logged * CHUNK_MASKS, first * CHUNK_MASKS)
    row = source.first_row + (first - entries.logged) * CHUNK
    behind = write_places(team, first, end, at, source.rows, row, False)
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
