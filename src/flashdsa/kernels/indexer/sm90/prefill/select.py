"""What happens behind a segment: every team ranks its queries.

Of the last segment, and of the log, the best are written out. Of another one what may be among the
best goes to the log: no score that is below topk others.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.bounds import (
    collect,
    load_candidates,
    mark_candidates,
    mark_chunks,
    mark_floor,
)
from flashdsa.kernels.indexer.sm90.prefill.emit import (
    Source,
    append,
    compact,
    row_of,
    share_of,
    write_rows,
)
from flashdsa.kernels.indexer.sm90.prefill.entries import (
    INVALID,
    LOWEST,
    MAGNITUDE,
    Entries,
    KeyRange,
    key_of,
)
from flashdsa.kernels.indexer.sm90.prefill.exact import mark_exactly
from flashdsa.kernels.indexer.sm90.prefill.plan import CANDIDATES, CHUNK, CHUNK_MASKS, TILE_KEYS
from flashdsa.kernels.indexer.sm90.prefill.team import (
    SCRATCH_COUNT,
    SCRATCH_SURE,
    Team,
    address_of,
    clear,
    find_bin,
    number_of_ones,
    part,
    team_sync,
)
from flashdsa.kernels.indexer.sm90.prefill.tiles import Ranges, Tile, range_of, scores_at
from flashdsa.kernels.indexer.sm90.prefill.window import Bounds, bounds_of


class SelectContext(NamedTuple):
    """Behind a barrier of all warps that score: the segment's scores are in the workspace."""

    ranges: Ranges
    workspace: Any  # pointer to Int32: this CTA's
    topk_indices: cute.Tensor  # (S, topk) int32
    topk_scores: Any  # (S, topk) Int32, bits of fp32; None: they are not written


@cute.jit
def select_segment(
    ctx: SelectContext,
    team: Team,
    tile: Tile,
    begin: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """The best of all queries of the tile among its key tiles before `end`; those before `begin`
    were chosen from already."""
    for turn in cutlass.range(plan.tile_queries // plan.teams, unroll=1):
        query = turn * plan.teams + team.number
        if tile.first_query + query < ctx.ranges.num_queries:
            select_query(ctx, team, tile, query, begin, end, plan)
        if end == tile.key_tiles:
            # The next tile's scores are counted behind a barrier of all warps that score.
            team_sync(team, plan)
            clear(team, part(team.arena, "histogram", query, plan.bins), plan.bins, plan)


@cute.jit
def select_query(
    ctx: SelectContext,
    team: Team,
    tile: Tile,
    query: Int32,
    begin: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """The same of a query of the tile."""
    rows = ctx.workspace + query * plan.row_words
    start, stop = range_of(ctx.ranges, tile.first_query + query)
    first_row = tile.first_key + begin * TILE_KEYS
    seen = cutlass.max(cutlass.min(stop, tile.first_key + end * TILE_KEYS) - start, Int32(0))
    written = (end - begin) * TILE_KEYS
    logs = part(team.arena, "logged", Int32(0), plan.tile_queries)
    logged = Int32(0)
    if begin > 0:
        logged = logs[query]
    log_chunks, own_chunks = chunks_of(logged), chunks_of(written)
    words, segment = rows + plan.log, scores_at(tile, plan)
    entries = Entries(words, segment - plan.log, log_chunks, log_chunks + own_chunks)
    source = Source(entries, rows, first_row)
    if team.member == 0:
        own = rows + segment
        for i in cutlass.range(written + team.lane, own_chunks * CHUNK, WARP_SIZE, unroll=1):
            (own + i).store(Int32(INVALID))
        if team.lane == 0:
            team.scratch[SCRATCH_COUNT] = Int32(0)
            team.scratch[SCRATCH_SURE] = Int32(0)
    topk = ctx.ranges.topk
    histogram = part(team.arena, "histogram", query, plan.bins)
    bounds = bounds_of(team.arena, query, find_bin(histogram, plan.bins, topk, team.lane).bin, plan)
    known = bounds.known and seen > topk
    team_sync(team, plan)
    if end == tile.key_tiles:
        mark_best(team, entries, bounds, known, seen, topk, plan)
        to, scores = row_of(ctx.topk_indices, tile.first_query + query, topk), None
        if cutlass.const_expr(plan.with_scores):
            scores = row_of(ctx.topk_scores, tile.first_query + query, topk)
        # Nothing is counted before the query's bins are cleared, so that places may lie there.
        stage, best = address_of(histogram), cutlass.min(seen, topk)
        write_rows(team, source, stage, to, scores, best, topk, plan)
    else:
        keep = mark_kept(team, source, bounds, known, logged, seen, topk, plan)
        total = append(team, source, keep, plan)
        if team.member == 0 and team.lane == 0:
            logs[query] = total


def chunks_of(entries: Int32) -> Int32:
    """That hold so many entries."""
    return (entries + CHUNK - 1) // CHUNK


@cute.jit
def mark_best(
    team: Team,
    entries: Entries,
    bounds: Bounds,
    known: cutlass.Boolean,
    seen: Int32,
    topk: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Masks of the best of log and segment. Starts and ends synced."""
    right, range_, wanted = known, KeyRange(Int32(LOWEST), Int32(MAGNITUDE)), topk
    if known:
        first, end = share_of(team, Int32(0), entries.count, plan)
        mark_chunks(team, entries, bounds, first, end, True, plan)
        collect(team, first, end)
        team_sync(team, plan)
        listed, sure = team.scratch[SCRATCH_COUNT], team.scratch[SCRATCH_SURE]
        wanted = topk - sure
        range_ = keys_between(bounds)
        right = listed <= CANDIDATES
        if right:
            load_candidates(team, entries, listed, plan)
            team_sync(team, plan)
            mark_candidates(team, listed, wanted, plan)
            team_sync(team, plan)
    if not right:
        mark_exactly(team, entries, range_, wanted, seen > topk, plan)


@cute.jit
def keys_between(bounds: Bounds) -> KeyRange:
    """Of the scores that may win and are not sure to."""
    high = key_of(bounds.sure.bitcast(Int32)) - 1
    if bounds.sure != bounds.sure:
        high = Int32(MAGNITUDE)
    return KeyRange(key_of(bounds.maybe.bitcast(Int32)), high)


@cute.jit
def mark_kept(
    team: Team,
    source: Source,
    bounds: Bounds,
    known: cutlass.Boolean,
    logged: Int32,
    seen: Int32,
    topk: Int32,
    plan: cutlass.Constexpr,
) -> Int32:
    """Masks of what of the segment goes to the log, for which there is room then; how many of the
    log stay. Starts and ends synced."""
    entries = source.entries
    keep, fits = logged, cutlass.Boolean(False)
    if known:
        first, end = share_of(team, entries.logged, entries.count, plan)
        mark_floor(team, entries, bounds.maybe, first, end, plan)
        team_sync(team, plan)
        fresh = number_of_ones(team, entries.logged * CHUNK_MASKS, entries.count * CHUNK_MASKS)
        fits = logged + fresh <= plan.log
        if not fits:
            first, end = share_of(team, Int32(0), entries.logged, plan)
            mark_floor(team, entries, bounds.maybe, first, end, plan)
            team_sync(team, plan)
            of_log = number_of_ones(team, Int32(0), entries.logged * CHUNK_MASKS)
            if of_log + fresh <= plan.log:
                fits = cutlass.Boolean(True)
                compact(team, source)
                keep = of_log
    if not fits:
        all_keys = KeyRange(Int32(LOWEST), Int32(MAGNITUDE))
        mark_exactly(team, entries, all_keys, topk, seen > topk, plan)
        keep = number_of_ones(team, Int32(0), entries.logged * CHUNK_MASKS)
        compact(team, source)
    team_sync(team, plan)
    return keep
