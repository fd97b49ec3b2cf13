"""The end of a segment: every team ranks its queries.

The best of the last segment, and of the log, are written out. Entries of another segment that may
be among the best go to the log: no score that is below topk others.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.select.sort_keys import INVALID, LOWEST, MAGNITUDE, key_of
from flashdsa.kernels.indexer.sm90.prefill import emit, marks, teams
from flashdsa.kernels.indexer.sm90.prefill import plan as sizes
from flashdsa.kernels.indexer.sm90.prefill.score import Prepared
from flashdsa.kernels.indexer.sm90.prefill.tiles import Ranges, Tile, scores_at


class SelectContext(NamedTuple):
    """Operands of the ranking, which follows a barrier of all warps that score: the segment's
    scores are in the workspace."""

    ranges: Ranges
    workspace: Any  # pointer to Int32: this CTA's
    topk_indices: cute.Tensor  # (S, topk) int32


class Seen(NamedTuple):
    """State of a team's query."""

    query: Int32  # of the tile
    entries: teams.Entries
    logged: Int32  # scores in the log
    keys: Int32  # in its range up to the segment's end
    is_last: cutlass.Boolean  # segment
    whole: Any = None  # Int32: keys that it sees, of all CTAs. None: one CTA has all
    before: Any = None  # Int32: those of the CTAs before


@cute.jit
def prepare_select(
    ctx: SelectContext, team: teams.Team, tile: Tile, prepared: Prepared, begin: Int32, end: Int32
) -> Seen:
    """Prepare, before the barrier after them, what ranking the key tiles `begin` to `end` - 1 reads
    besides their scores: entries without scores from their end to a chunk's end, and counts of 0.
    """
    plan = team.plan
    query = team.number
    start, length = range_kept(prepared, query, plan)
    row_end = cutlass.min(start + length, tile.first_key + end * sizes.TILE_KEYS)
    written = (end - begin) * sizes.TILE_KEYS
    whole, before = None, None
    if cutlass.const_expr(plan.shared):
        whole = length
        before = cutlass.min(cutlass.max(tile.first_key - start, Int32(0)), length)
        start = start + before
    logged = Int32(0)  # of a query without keys, too
    if begin > 0 and length > 0:
        logged = team.memory.logged.array(Int32, plan.tile_queries)[query]
    log_chunks, own_chunks = chunks_of(logged), chunks_of(written)
    if cutlass.const_expr(plan.shared):
        own_chunks = cutlass.max(own_chunks, Int32(1))  # without keys, too: samples lie there
    words, segment = ctx.workspace + (query * plan.row_words + plan.log), scores_at(tile, plan)
    if team.member == 0:
        own = words + (segment - plan.log)
        for i in cutlass.range(written + team.lane, own_chunks * sizes.CHUNK, WARP_SIZE, unroll=1):
            (own + i).store(Int32(INVALID))
        if team.lane == 0:
            team.scratch[teams.TeamScratch.COUNT] = Int32(0)
            team.scratch[teams.TeamScratch.SURE] = Int32(0)
            if cutlass.const_expr(plan.shared):
                team.scratch[teams.TeamScratch.WINNERS] = Int32(0)
    entries = teams.Entries(words, segment - plan.log, log_chunks, log_chunks + own_chunks)
    keys, is_last = cutlass.max(row_end - start, Int32(0)), end == tile.key_tiles
    return Seen(query, entries, logged, keys, is_last, whole, before)


@cute.jit
def range_kept(prepared: Prepared, query: Int32, plan: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """(first key, number of keys) in the range of a query of the tile, from the lane that
    scores for it."""
    lane, start, length = query % sizes.QUERY_GROUP, prepared.starts[0], prepared.lengths[0]
    if cutlass.const_expr(plan.groups == 2):
        if query >= sizes.QUERY_GROUP:
            start, length = prepared.starts[1], prepared.lengths[1]
    return cute.arch.shuffle_sync(start, lane), cute.arch.shuffle_sync(length, lane)


@cute.jit
def select_segment(
    ctx: SelectContext, team: teams.Team, tile: Tile, seen: Seen, begin: Int32
) -> None:
    """Select the best of the team's query among the key tiles of a segment, of which `begin` is the
    first; those before it were chosen from already. Starts and ends synced."""
    plan = team.plan
    query = seen.query
    if tile.first_query + query < ctx.ranges.num_queries:
        # They come while the bin is searched.
        ahead = marks.load_ahead(team, seen.entries, first_chunk(team, seen))
        topk = ctx.ranges.topk
        histogram = team.memory.histogram.array(Int32, plan.bins, query)
        bounds = own_bounds(team, seen, histogram, topk)
        source = source_of(ctx, team, tile, seen, begin)
        if seen.is_last:
            mark_best(team, seen, bounds, ahead, topk)
            to = emit.row_of(ctx.topk_indices, tile.first_query + query, topk)
            # Nothing is counted before the query's bins are cleared, so that indices may lie in
            # them.
            stage, best = teams.address_of(histogram), cutlass.min(seen.keys, topk)
            emit.write_rows(team, source, stage, to, best, topk)
        else:
            log_best(team, source, seen, bounds, ahead, topk)
    if seen.is_last:
        clear_counts(team, query)


@cute.jit
def own_bounds(team: teams.Team, seen: Seen, histogram: cute.Tensor, topk: Int32) -> teams.Bounds:
    """Bounds of the `topk`-th best among what this CTA has counted."""
    plan = team.plan
    cut = teams.find_bin(histogram, plan.bins, topk, team.lane).bin
    bounds = teams.bounds_of(team.memory, seen.query, cut, plan)
    return teams.Bounds(bounds.maybe, bounds.sure, bounds.known and seen.keys > topk)


def source_of(
    ctx: SelectContext, team: teams.Team, tile: Tile, seen: Seen, begin: Int32
) -> emit.Source:
    """The query's entries with their rows, if a segment begins with the key tile `begin`."""
    rows = ctx.workspace + seen.query * team.plan.row_words
    return emit.Source(seen.entries, rows, tile.first_key + begin * sizes.TILE_KEYS)


@cute.jit
def log_best(
    team: teams.Team, source: emit.Source, seen: Seen, bounds: teams.Bounds, ahead: Any, topk: Int32
) -> Int32:
    """Put the segment's entries that may be among the best in the log; return how many it has
    then. Starts synced."""
    keep = mark_kept(team, source, seen, bounds, ahead, topk)
    total = emit.append(team, source, keep)
    logs = team.memory.logged.array(Int32, team.plan.tile_queries)
    if team.member == 0 and team.lane == 0:
        logs[seen.query] = total
    return total


@cute.jit
def clear_counts(team: teams.Team, query: Int32) -> None:
    """Clear the query's bins after a tile. Starts not synced; the next tile's scores are counted
    after a barrier of all warps that score."""
    plan = team.plan
    teams.team_sync(team)
    teams.clear(team, team.memory.histogram.array(Int32, plan.bins, query), plan.bins)


@cute.jit
def first_chunk(team: teams.Team, seen: Seen) -> Int32:
    """First chunk that this warp votes on: of log and segment, or of a segment that goes to the
    log."""
    begin = seen.entries.logged
    if seen.is_last:
        begin = Int32(0)
    first, _ = emit.share_of(team, begin, seen.entries.count)
    return first


def chunks_of(entries: Int32) -> Int32:
    """Chunks that hold `entries` entries."""
    return (entries + sizes.CHUNK - 1) // sizes.CHUNK


@cute.jit
def mark_best(team: teams.Team, seen: Seen, bounds: teams.Bounds, ahead: Any, topk: Int32) -> None:
    """Mark the best of log and segment. Starts and ends synced."""
    entries = seen.entries
    right, range_, wanted = bounds.known, teams.KeyRange(Int32(LOWEST), Int32(MAGNITUDE)), topk
    if bounds.known:
        first, end = emit.share_of(team, Int32(0), entries.count)
        marks.mark_chunks(team, entries, bounds, first, end, ahead, True)
        marks.collect(team, first, end)
        teams.team_sync(team)
        listed, sure = team.scratch[teams.TeamScratch.COUNT], team.scratch[teams.TeamScratch.SURE]
        wanted = topk - sure
        range_ = keys_between(bounds)
        right = listed <= sizes.CANDIDATES
        if right:
            marks.load_candidates(team, entries, listed)
            teams.team_sync(team)
            marks.mark_candidates(team, listed, wanted)
            teams.team_sync(team)
    if not right:
        marks.mark_exactly(team, entries, range_, wanted, seen.keys > topk)


@cute.jit
def keys_between(bounds: teams.Bounds) -> teams.KeyRange:
    """Keys of the scores that may win and are not sure to."""
    high = key_of(bounds.sure.bitcast(Int32)) - 1
    if bounds.sure != bounds.sure:
        high = Int32(MAGNITUDE)
    return teams.KeyRange(key_of(bounds.maybe.bitcast(Int32)), high)


@cute.jit
def mark_kept(
    team: teams.Team, source: emit.Source, seen: Seen, bounds: teams.Bounds, ahead: Any, topk: Int32
) -> Int32:
    """Mark the segment's entries that go to the log, which has room for them then; return how many
    of the log stay. Starts and ends synced."""
    plan = team.plan
    entries, logged = source.entries, seen.logged
    keep, fits = logged, cutlass.Boolean(False)
    if bounds.known:
        first, end = emit.share_of(team, entries.logged, entries.count)
        marks.mark_floor(team, entries, bounds.maybe, first, end, ahead)
        teams.team_sync(team)
        fresh = teams.number_of_ones(
            team, entries.logged * sizes.CHUNK_MASKS, entries.count * sizes.CHUNK_MASKS
        )
        fits = logged + fresh <= plan.log
        if not fits:
            first, end = emit.share_of(team, Int32(0), entries.logged)
            of_log = marks.load_ahead(team, entries, first)
            marks.mark_floor(team, entries, bounds.maybe, first, end, of_log)
            teams.team_sync(team)
            left = teams.number_of_ones(team, Int32(0), entries.logged * sizes.CHUNK_MASKS)
            if left + fresh <= plan.log:
                fits = cutlass.Boolean(True)
                emit.compact(team, source)
                keep = left
    if not fits:
        marks.mark_exactly(
            team, entries, teams.KeyRange(Int32(LOWEST), Int32(MAGNITUDE)), topk, seen.keys > topk
        )
        keep = teams.number_of_ones(team, Int32(0), entries.logged * sizes.CHUNK_MASKS)
        emit.compact(team, source)
    teams.team_sync(team)
    return keep
