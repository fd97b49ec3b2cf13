"""What happens between segments: every team ranks its queries and writes their winners."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.emit import BEST_CHUNKS, Winners, emit, row_of
from flashdsa.kernels.indexer.sm90.prefill.entries import INVALID, LOWEST, Entries
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK, MAX_TOPK, TILE_KEYS
from flashdsa.kernels.indexer.sm90.prefill.rank import Team, Threshold, find_threshold, team_sync
from flashdsa.kernels.indexer.sm90.prefill.tiles import Ranges, Tile, range_of


class SelectContext(NamedTuple):
    """Behind a barrier of all warps that score: the segment's scores are in the workspace."""

    ranges: Ranges
    workspace: Any  # pointer to Int32: this CTA's
    topk_indices: cute.Tensor  # (S, topk) int32


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
    words = ctx.workspace + query * plan.row_words
    start, stop = range_of(ctx.ranges, tile.first_query + query)
    first_row = tile.first_key + begin * TILE_KEYS
    behind = tile.first_key + end * TILE_KEYS
    seen = cutlass.max(cutlass.min(stop, behind) - start, Int32(0))
    seen_before = cutlass.max(cutlass.min(stop, first_row) - start, Int32(0))
    written = (end - begin) * TILE_KEYS
    end_chunk = BEST_CHUNKS + (written + CHUNK - 1) // CHUNK
    if team.member == 0:
        padded = (end_chunk - BEST_CHUNKS) * CHUNK
        for i in cutlass.range(written + team.lane, padded, WARP_SIZE, unroll=1):
            (words + (MAX_TOPK + i)).store(Int32(INVALID))
    team_sync(team, plan)
    topk = ctx.ranges.topk
    threshold = Threshold(Int32(LOWEST), Int32(0), cutlass.Boolean(False))
    first = begin == 0
    if seen > topk:
        first_chunk = Int32(0)
        if first:
            first_chunk = Int32(BEST_CHUNKS)
        entries = Entries(words, first_chunk, end_chunk)
        sampled = end_chunk
        if seen_before >= topk:
            sampled = Int32(MAX_TOPK // CHUNK)
        threshold = find_threshold(team, entries, Entries(words, first_chunk, sampled), topk, plan)
    winners = Winners(
        words,
        row_of(ctx.topk_indices, tile.first_query + query, topk),
        first_row,
        cutlass.min(seen, topk),
        topk,
        end == tile.key_tiles,
        threshold,
    )
    emit(team, winners, end_chunk, first, plan)
