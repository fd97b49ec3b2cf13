"""Writing of marked entries in their order: their rows to the output, or the entries to the log.

Every warp knows from the masks how many come before its own, so none waits for another.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.gmem import load_if, store4, store_if
from flashdsa.dsl.smem import load4, load_half, store_half_if
from flashdsa.dsl.warp import prefix_sum, prefix_sums
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.select.sort_keys import INVALID
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK, CHUNK_MASKS, INDEX_BYTES, WORD
from flashdsa.kernels.indexer.sm90.prefill.teams import (
    WORDS_EACH,
    Entries,
    Team,
    address_of,
    load_chunk,
    number_of_ones,
    team_sync,
)
from flashdsa.kernels.indexer.sm90.prefill.tiles import Ranges, Tile, range_of

STEPS = 2
"""Bits of a word between two checks whether any lane has more."""
DENSE = 28
"""Bits of a word above which all lanes take a word together, not one word a lane."""


@cute.jit
def write_indices(
    team: Team, begin: Int32, end: Int32, at: Int32, to: Any, first: Int32, what: cutlass.Constexpr
) -> None:
    """Write `first` + the index in the chunks `begin` to `end` - 1 of each of their marked entries,
    the first one at index `at`. A lane takes a word of a chunk. to: "log": a pointer to Int32;
    "best" and "kept": an address in shared memory, of 16-bit words. "best": where words have many
    bits, a lane takes a bit of each word, and the maybes are overwritten."""
    plan = team.plan
    write = store_highest if what == "log" else store_highest_shared
    size = 1 if what == "log" else INDEX_BYTES
    for chunk in cutlass.range(begin, end, plan.chunks_written, unroll=1):
        masks, ones, most = [], [], Int32(0)
        for i in cutlass.range_constexpr(plan.chunks_written):
            mask = team.masks[cutlass.min(chunk + i, end - 1) * CHUNK_MASKS + team.lane]
            if chunk + i >= end:
                mask = Int32(0)
            masks.append(mask)
            ones.append(Int32(cute.arch.popc(mask)))
            most = cutlass.max(most, ones[i])
        most = cute.arch.warp_redux_sync(most, "max")
        firsts = []  # output index of the first marked entry of this lane's word of each
        through = prefix_sums(ones, team.lane)
        for i in cutlass.range_constexpr(plan.chunks_written):
            firsts.append(at + through[i] - ones[i])
            at += cute.arch.shuffle_sync(through[i], WARP_SIZE - 1)
        entry = first + (chunk - begin) * CHUNK
        dense = cutlass.Boolean(False)
        if cutlass.const_expr(what == "best"):
            dense = most > DENSE
        if dense:
            for i in cutlass.range_constexpr(plan.chunks_written):
                if chunk + i < end:
                    team.maybes[(chunk + i) * CHUNK_MASKS + team.lane] = firsts[i]
            cute.arch.sync_warp()  # all lanes read all of them
            words_end = cutlass.min(chunk + plan.chunks_written, end) * CHUNK_MASKS
            write_words(team, chunk * CHUNK_MASKS, words_end, to, entry)
        else:
            word, last = entry + team.lane * WARP_SIZE, []
            for i in cutlass.range_constexpr(plan.chunks_written):
                last.append(to + (firsts[i] + ones[i] - 1) * size)
            for _ in cutlass.range((most + STEPS - 1) // STEPS, unroll=1):
                for step in cutlass.range_constexpr(STEPS):
                    for i in cutlass.range_constexpr(plan.chunks_written):
                        masks[i] = write(masks[i], last[i] - step * size, word + CHUNK * i)
                for i in cutlass.range_constexpr(plan.chunks_written):
                    last[i] = last[i] - STEPS * size


@cute.jit
def write_words(team: Team, begin: Int32, end: Int32, to: Int32, first: Int32) -> None:
    """Write the same for the words `begin` to `end` - 1; a lane takes a bit of each: lanes with
    many bits of a word each would store to the same banks. The output indices of the words' first
    entries are where their maybes were. first: index of the first word's first entry."""
    below, own = Int32(cute.arch.lanemask_lt()), Int32(1) << team.lane
    entry = first + team.lane
    for four in cutlass.range(begin // 4, end // 4, unroll=1):
        masks, firsts = load4(team.masks, four), load4(team.maybes, four)
        for i in cutlass.range_constexpr(4):
            index = firsts[i] + Int32(cute.arch.popc(masks[i] & below))
            store_half_if(masks[i] & own, to + index * INDEX_BYTES, entry + WARP_SIZE * i)
        entry += 4 * WARP_SIZE


def store_highest(rest: Int32, pointer: Any, first: Int32) -> Int32:
    """Store `first` + the position of the highest bit, if any is set; return the bits below it."""
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


TOGETHER = 8
"""Loads of a lane that are under way at the same time."""
STORED = 4
"""Loads of 16 bytes of rows by a lane before it stores them."""


class Source(NamedTuple):
    """Entries, and their rows."""

    entries: Entries
    rows: Any  # pointer to Int32: rows of the log's entries
    first_row: Int32  # of the segment's first entry


@cute.jit
def write_rows(team: Team, source: Source, stage: Int32, to: Any, best: Int32, topk: Int32) -> None:
    """Write the rows of all marked entries, `best` of them, then -1 up to topk. Ends not synced.
    stage: shared memory address of room for MAX_TOPK indices in the segment. to: pointer to the
    query's row of the output."""
    entries = source.entries
    log_masks, first = entries.logged * CHUNK_MASKS, Int32(0)  # of the segment's
    if entries.logged > 0:
        begin, end = share_of(team, Int32(0), entries.logged)
        at = number_of_ones(team, Int32(0), begin * CHUNK_MASKS)
        write_log(team, source, to, begin, end, at)
        first = number_of_ones(team, Int32(0), log_masks)
    begin, end = share_of(team, entries.logged, entries.count)
    at = first + number_of_ones(team, log_masks, begin * CHUNK_MASKS)
    own = (begin - entries.logged) * CHUNK
    write_indices(team, begin, end, at, stage, own, "best")
    team_sync(team)  # all indices are staged
    write_staged(team, source, stage, to, first, best, topk)


def share_of(team: Team, begin: Int32, end: Int32) -> tuple[Int32, Int32]:
    """(first, one past the last) that this warp takes of `begin` to `end` - 1."""
    plan = team.plan
    share = (end - begin + plan.team_warps - 1) // plan.team_warps
    first = begin + team.member * share
    return first, cutlass.min(first + share, end)


class Numbered(NamedTuple):
    """The marked entries of a chunk, one word per lane, as counting bits is slow."""

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
    """Write each word's first output index over its maybes, if the chunk's first marked entry goes
    to index `at`."""
    team.maybes[chunk * CHUNK_MASKS + team.lane] = at + numbered.through - numbered.ones
    cute.arch.sync_warp()  # all lanes read all of them


@cute.jit
def write_log(team: Team, source: Source, to: Any, begin: Int32, end: Int32, at: Int32) -> None:
    """Same as `write_staged`, for some chunks of the log; the first row goes to index `at`."""
    for chunk in cutlass.range(begin, end, unroll=1):
        numbered = number_chunk(team, chunk)
        place_words(team, chunk, numbered, at)
        rows = load_marked(team, chunk, source.rows + (chunk * CHUNK + team.lane))
        store_marked(team, chunk, to, rows)
        at += numbered.total


@cute.jit
def write_staged(
    team: Team, source: Source, stage: Int32, to: Any, begin: Int32, end: Int32, topk: Int32
) -> None:
    """Write the rows of the staged indices `begin` to `end` - 1, then -1 up to topk, by all warps
    of the team. A lane takes four that fill 16 bytes of the output."""
    plan = team.plan
    ahead = Int32(to.toint() >> 2) & 3  # words of 16 bytes before the output's first
    own, step = team.member * WARP_SIZE + team.lane, plan.team_warps * WARP_SIZE
    first, last = (begin + ahead) // 4, (topk + ahead + 3) // 4
    whole = (begin + ahead + 3) // 4
    whole_end = cutlass.max((end + ahead) // 4, whole)
    address, row = stage - ahead * INDEX_BYTES, to - ahead
    for four in cutlass.range(whole + own, whole_end, STORED * step, unroll=1):
        rows = []
        for i in cutlass.range_constexpr(STORED):
            index = cutlass.min(four + i * step, whole_end - 1)
            four_at = address + index * (4 * INDEX_BYTES)
            rows.append([load_half(four_at + k * INDEX_BYTES) for k in range(4)])
        for i in cutlass.range_constexpr(STORED):
            if four + i * step < whole_end:
                at = row + (four + i * step) * 4
                store4(at, [index + source.first_row for index in rows[i]])
    for edge in cutlass.range(own, whole - first + last - whole_end, step, unroll=1):
        four = first + edge
        if four >= whole:
            four += whole_end - whole
        for i in cutlass.range_constexpr(4):
            index = four * 4 + i - ahead
            if index >= begin and index < topk:
                value = Int32(-1)
                if index < end:
                    value = load_half(stage + index * INDEX_BYTES) + source.first_row
                (to + index).store(value)


@cute.jit
def load_marked(team: Team, chunk: Int32, at: Any) -> cute.Tensor:
    """Load this lane's words of a chunk's marked entries; else 0, as rows after the last entry were
    never written."""
    own = Int32(1) << team.lane
    mine = cute.make_rmem_tensor(WORDS_EACH, Int32)
    for four in cutlass.range_constexpr(CHUNK_MASKS // 4):
        masks = load4(team.masks, chunk * (CHUNK_MASKS // 4) + four)
        for i in cutlass.range_constexpr(4):
            index = 4 * four + i
            mine[index] = load_if(masks[i] & own, at + WARP_SIZE * index)
    return mine


@cute.jit
def store_marked(team: Team, chunk: Int32, to: Any, words: cute.Tensor) -> None:
    """Store the words of a chunk's marked entries at their indices."""
    below, own = Int32(cute.arch.lanemask_lt()), Int32(1) << team.lane
    for four in cutlass.range_constexpr(CHUNK_MASKS // 4):
        masks = load4(team.masks, chunk * (CHUNK_MASKS // 4) + four)
        firsts = load4(team.maybes, chunk * (CHUNK_MASKS // 4) + four)
        for i in cutlass.range_constexpr(4):
            index = firsts[i] + Int32(cute.arch.popc(masks[i] & below))
            store_if(masks[i] & own, to + index, words[4 * four + i])


@cute.jit
def append(team: Team, source: Source, logged: Int32) -> Int32:
    """Append the segment's marked entries after the first `logged` of the log, which has room, then
    entries without scores up to a chunk's end; return how many are logged. Ends not synced."""
    plan = team.plan
    entries = source.entries
    chunk, end = share_of(team, entries.logged, entries.count)
    log_masks = entries.logged * CHUNK_MASKS
    at = logged + number_of_ones(team, log_masks, chunk * CHUNK_MASKS)
    # The maybes are not read any more: each warp keeps indices in its part of them.
    room = plan.masks * WORD // INDEX_BYTES // plan.team_warps
    stage = address_of(team.maybes) + team.member * (room * INDEX_BYTES)
    while chunk < end:
        chunk_end = cutlass.min(chunk + plan.chunks_logged, end)
        marked = number_of_ones(team, chunk * CHUNK_MASKS, chunk_end * CHUNK_MASKS)
        while marked > room and chunk_end > chunk + 1:
            chunk_end = (chunk + chunk_end) // 2
            marked = number_of_ones(team, chunk * CHUNK_MASKS, chunk_end * CHUNK_MASKS)
        first = (chunk - entries.logged) * CHUNK
        if marked <= room:
            write_indices(team, chunk, chunk_end, Int32(0), stage, first, "kept")
            cute.arch.sync_warp()  # lanes read what others wrote
            log_staged(team, source, stage, at, marked)
            cute.arch.sync_warp()  # all have been read
        else:
            row = source.first_row + first
            write_indices(team, chunk, chunk_end, at, source.rows, row, "log")
            cute.arch.sync_warp()  # lanes read what others wrote
            copy_scores(team, source, source.rows, entries.words, at, at + marked)
        at += marked
        chunk = chunk_end
    total = logged + number_of_ones(team, log_masks, entries.count * CHUNK_MASKS)
    if team.member == plan.team_warps - 1:
        padded = (total + CHUNK - 1) // CHUNK * CHUNK
        for i in cutlass.range(total + team.lane, padded, WARP_SIZE, unroll=1):
            (entries.words + i).store(Int32(INVALID))
    return total


@cute.jit
def log_staged(team: Team, source: Source, stage: Int32, at: Int32, count: Int32) -> None:
    """Copy rows and scores of `count` staged indices of the segment to the log, from index `at`."""
    scores = source.entries.words + at
    segment = source.entries.words + source.entries.segment
    for first in cutlass.range(team.lane, count + team.lane, TOGETHER * WARP_SIZE, unroll=1):
        indices, words = [], []
        for i in cutlass.range_constexpr(TOGETHER):
            own = cutlass.min(first + WARP_SIZE * i, count - 1)
            indices.append(load_half(stage + own * INDEX_BYTES))
        for i in cutlass.range_constexpr(TOGETHER):
            words.append((segment + indices[i]).load())
        for i in cutlass.range_constexpr(TOGETHER):
            own = first + WARP_SIZE * i
            taken = Int32(1) if own < count else Int32(0)
            store_if(taken, source.rows + (at + own), source.first_row + indices[i])
            store_if(taken, scores + own, words[i])


@cute.jit
def copy_scores(team: Team, source: Source, rows: Any, to: Any, begin: Int32, end: Int32) -> None:
    """Copy the scores of rows `begin` to `end` - 1 of a list, which are of the segment, to the same
    indices."""
    segment = source.entries.words + source.entries.segment
    for first in cutlass.range(begin + team.lane, end + team.lane, TOGETHER * WARP_SIZE, unroll=1):
        indices, taken, words = [], [], []
        for i in cutlass.range_constexpr(TOGETHER):
            index = first + WARP_SIZE * i
            indices.append(index)
            taken.append(Int32(1) if index < end else Int32(0))
        chosen = [load_if(taken[i], rows + indices[i]) for i in range(TOGETHER)]
        for i in cutlass.range_constexpr(TOGETHER):
            words.append(load_if(taken[i], segment + (chosen[i] - source.first_row)))
        for i in cutlass.range_constexpr(TOGETHER):
            store_if(taken[i], to + indices[i], words[i])


@cute.jit
def compact(team: Team, source: Source) -> None:
    """Drop the log's entries without a mark, by the team's first warp. Ends not synced."""
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
    """Write a chunk's marked entries to the log, from index `at` on; return the index after the
    last."""
    below, own = Int32(cute.arch.lanemask_lt()), Int32(1) << team.lane
    numbered = number_chunk(team, chunk)
    place_words(team, chunk, numbered, at)
    for four in cutlass.range_constexpr(CHUNK_MASKS // 4):
        masks = load4(team.masks, chunk * (CHUNK_MASKS // 4) + four)
        firsts = load4(team.maybes, chunk * (CHUNK_MASKS // 4) + four)
        for i in cutlass.range_constexpr(4):
            index = firsts[i] + Int32(cute.arch.popc(masks[i] & below))
            taken = masks[i] & own
            store_if(taken, source.entries.words + index, words[4 * four + i])
            store_if(taken, source.rows + index, rows[4 * four + i])
    return at + numbered.total


@cute.jit
def emit_unscored(
    ranges: Ranges, tile: Tile, rows: cute.Tensor, warp: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Write all entries, then -1, of a tile whose queries have at most topk each."""
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
