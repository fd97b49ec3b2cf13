"""A row is one cluster's, or that of an equal part of one: its CTAs select together."""

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from flashdsa.dsl.pipeline import PackedPhases
from flashdsa.kernels.indexer.consumers import Selecting
from flashdsa.kernels.indexer.emit.by_position import (
    WarpSpan,
    emit_by_position,
    emit_in_order,
    own_span,
)
from flashdsa.kernels.indexer.emit.by_score import emit_sorted
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile
from flashdsa.kernels.indexer.select.lists import compact
from flashdsa.kernels.indexer.select.threshold import find_threshold
from flashdsa.kernels.indexer.select.tiles import (
    compacted,
    is_full,
    nothing_listed,
    part_of,
    release_tile,
    tile_stage,
)


@cute.jit
def select_by_cluster(
    s: Selecting, source: Any, fill: cutlass.Constexpr, tile: WorkTile, phases: PackedPhases
) -> PackedPhases:
    """Select in a tile, whose row no other cluster has a part of; see tiles.py."""
    plan = s.plan
    listed, scored = nothing_listed(), cutlass.Boolean(False)
    while not scored:
        listed = fill(s, source, tile, tile_stage(s, phases), listed)
        part = part_of(tile, listed.entries)
        scored = listed.pages == tile.num_pages
        if scored:
            release_tile(s, phases)
        in_order = listed.floor == 0  # a compaction ends that
        if scored or in_order or is_full(s, listed.entries):
            span = WarpSpan(Int32(0), Int32(0), Int32(0))
            if const_expr(plan.lists_in_order):
                if scored and in_order:
                    span = own_span(s, tile.row, part)
            # A list that is compacted keeps at least topk entries; those of the last bin, too.
            threshold, phases = find_threshold(
                s, scored and s.coord.num_parts > 1, not scored, part, phases
            )
            if not scored:
                listed = compacted(s, tile, listed, threshold)
            elif const_expr(plan.sorted):
                winners = compact(s, part.entries, threshold.key, threshold.position)
                phases = emit_sorted(s, tile.row, winners, threshold, phases)
            elif const_expr(not plan.lists_in_order):
                emit_by_position(s, tile.row, part, threshold)
            elif in_order:
                emit_in_order(s, tile.row, part, span, threshold)
            else:
                emit_by_position(s, tile.row, part, threshold)
    return phases
