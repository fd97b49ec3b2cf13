"""The consumers' loop: fill the list with a tile's scores, find the threshold, write the winners.

The loop does not know the source of the scores: `fill` scores pages, or reads given scores.
"""

from typing import Any

import cutlass
from cutlass import Int32, Uint32, const_expr, cute

from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.pipeline import PackedPhases
from flashdsa.dsl.static import Static
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import Selecting
from flashdsa.kernels.indexer.emit.by_position import (
    WarpSpan,
    emit_by_position,
    emit_in_order,
    emit_pair_row,
    own_span,
)
from flashdsa.kernels.indexer.emit.by_score import emit_sorted
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile, row_length, wait_for_tile
from flashdsa.kernels.indexer.select.by_clusters import (
    announce_published,
    list_published,
    merged_part,
    publish,
)
from flashdsa.kernels.indexer.select.by_ctas import list_slots, publish_alone, raise_threshold
from flashdsa.kernels.indexer.select.exchange import EVENTS
from flashdsa.kernels.indexer.select.keys import Part
from flashdsa.kernels.indexer.select.list_segments import compact_segments
from flashdsa.kernels.indexer.select.lists import Batch, compact, reset
from flashdsa.kernels.indexer.select.row_counts import contribute, counts_settle, keep_contributed
from flashdsa.kernels.indexer.select.threshold import Threshold, find_threshold
from flashdsa.kernels.indexer.smem_views import SCRATCH_FULLEST
from flashdsa.problem import PAGE_SIZE


@cute.jit
def select_rows(s: Selecting, source: Any, fill: cutlass.Constexpr) -> None:
    """Select in every tile that the load warps announce.

    The inner loop has one copy of the search for a threshold: over the caller's part when the list
    is full, over the whole row, with the other CTAs of the group, when the part is scored.

    Args:
        source: of scores, what `fill` takes.
        fill: (s, source, batch, entries, floor) lists scores while the list has
            room; returns (entries of the list, the tile's first page that is not listed).
        plan: of a team, if the CTA has several: each selects in its own row of a tile, and all
            compact their lists after the same pages.
    """
    plan, lane = s.plan, s.thread % WARP_SIZE
    phases = PackedPhases(Int32(0), Static(EVENTS))  # and the number of the tile
    reset(s)
    # The cluster's barrier: every CTA of it has initialised its mbarriers, so that messages may be
    # sent to them.
    cute.arch.cluster_wait()
    tile = next_tile(s, Int32(0))
    while tile.row >= 0:
        entries, done = Int32(0), Int32(0)  # of the list; pages listed
        floor = Uint32(0)  # keys below it cannot win any more
        selected = cutlass.Boolean(False)
        merges = cutlass.Boolean(False)
        while not selected:
            part = Part(Int32(0), Int32(0), Int32(0))
            stage = tile_stage(s, phases)
            last = tile.num_pages
            if not merges:
                batch = Batch(tile, stage, done)
                entries, done = fill(s, source, batch, entries, floor)
                part = part_of(tile, entries, plan)
            else:
                part, done, last = merge(s, tile, done, entries, floor)
                entries = part.entries
            scored = done == last
            if scored and not merges and lane == 0:
                # tile_empty[stage]: this warp has read queries, weights and description for the
                # last time; `fill` has ended with a sync of all consumers.
                s.inputs.tile_ring.release(tile_stage(s, phases))
            fullest = s.select.scratch[SCRATCH_FULLEST] if const_expr(plan.pairs) else entries
            full = merges or plan.list_capacity - fullest < plan.refill_entries
            # floor 0 says that the list is in the order of positions; a compaction ends that.
            if scored or full or floor == 0:
                publishes, in_order = cutlass.Boolean(False), cutlass.Boolean(False)
                span = WarpSpan(Int32(0), Int32(0), Int32(0))
                if const_expr(s.published is not None):
                    publishes = scored and tile.num_splits > 1 and not merges
                if const_expr(plan.lists_in_order):
                    in_order = scored and floor == 0
                    if const_expr(s.published is not None):
                        in_order = in_order and tile.num_splits == 1
                    if in_order:
                        span = own_span(s, tile.row, part)
                here, counts = at_selection(s), cutlass.Boolean(False)
                settles = cutlass.Boolean(False)
                shared = scored and here.coord.num_parts > 1
                if const_expr(plan.splits_to_ctas):
                    counts = tile.num_splits > 1 and not merges
                    settles = scored and counts_settle(s, tile)
                    if counts:
                        contribute(s, floor, settles)
                # A list that is cut down keeps at least topk entries; those of the last bin, too.
                to_bin = publishes or not scored
                threshold, phases = find_threshold(here, shared, to_bin, part, phases)
                # An equal key further on has a larger position.
                next_floor = threshold.key + 1
                if const_expr(plan.splits_to_ctas):
                    if counts:
                        threshold, next_floor = raise_threshold(s, threshold, floor, settles)
                if not scored:
                    entries = cut_down(s, entries, merges, threshold)
                    floor = next_floor
                    if const_expr(plan.splits_to_ctas):
                        if counts:
                            keep_contributed(s)
                elif publishes:
                    if const_expr(s.published is not None):
                        merges, entries = publish_part(here, tile.row, part, threshold)
                        selected = not merges
                        if const_expr(plan.splits_to_ctas):
                            done, floor = Int32(0), Uint32(0)
                else:
                    if has_output(tile, plan):
                        phases = emit_row(here, tile.row, part, in_order, span, threshold, phases)
                    selected = cutlass.Boolean(True)
        reset(s)
        phases = phases.next_number()
        tile = next_tile(s, phases.number)


@cute.jit
def cut_down(s: Selecting, entries: Int32, merges: cutlass.Boolean, threshold: Threshold) -> Int32:
    """Keep only the list's accepted entries; return the new length. Ends synced.

    Args:
        merges: the list has published entries, which are appended to it as a whole.
    """
    if const_expr(s.plan.pairs):
        if merges:
            entries = compact(s, entries, threshold.key, threshold.position)
        else:
            compact_segments(s, threshold)
    else:
        entries = compact(s, entries, threshold.key, threshold.position)
    return entries


@cute.jit
def next_tile(s: Selecting, number: Int32) -> WorkTile:
    """The CTA's tile of that number; of a pair of rows, the part of the caller's row."""
    tile = wait_for_tile(s.inputs, number, s.plan)
    if const_expr(s.plan.pairs):
        if tile.row >= 0:
            row = 2 * tile.row + s.team
            tile = tile._replace(row=row, length=row_length(s.output.rows, row))
    return tile


def at_selection(s: Selecting) -> Selecting:
    """The context with all coordinates that selecting needs."""
    return s._replace(coord=s.coord.unpacked()) if s.plan.splits_to_ctas else s


def tile_stage(s: Selecting, phases: PackedPhases) -> Int32:
    """The stage of the tile that `phases` numbers, computed anew wherever it is asked for: kept in
    a register through the loops that score, it would make the compiler spill others."""
    number = phases._replace(bits=opaque(phases.bits)).number
    return s.inputs.tile_ring.state(number).stage


def has_output(tile: WorkTile, plan: Any) -> Any:
    """False for a row that needed no scores, and was scored because the other row of its pair did:
    its ids are written (see emit_unscored_rows)."""
    return tile.length > plan.unscored_length if plan.pairs else True


@cute.jit
def emit_row(
    s: Selecting,
    row: Int32,
    part: Part,
    in_order: cutlass.Boolean,
    span: WarpSpan,
    threshold: Threshold,
    phases: PackedPhases,
) -> PackedPhases:
    """Write the ids of the part's winners; return the events' phases after it."""
    plan = s.plan
    if const_expr(plan.sorted):
        winners = compact(s, part.entries, threshold.key, threshold.position)
        phases = emit_sorted(s, row, winners, threshold, phases)
    elif in_order:
        emit_in_order(s, row, part, span, threshold)
    elif const_expr(plan.pairs):
        emit_pair_row(s, row, part, threshold)
    else:
        emit_by_position(s, row, part, threshold)
    return phases


@cute.jit
def publish_part(
    s: Selecting, row: Int32, part: Part, threshold: Threshold
) -> tuple[cutlass.Boolean, Int32]:
    """Publish the part's best. The list in the row's last cluster becomes what the caller selects
    from all clusters' best; if CTAs select alone, it becomes empty in the row's last CTA. Return
    (whether this is the last, entries of the list)."""
    entries = Int32(0)
    if const_expr(s.plan.splits_to_ctas):
        is_last = publish_alone(s, part, threshold)
    else:
        cta, _, _ = cute.arch.block_idx()
        publish(s, cta, part, threshold)
        is_last = announce_published(s, row)
        if is_last:
            entries = list_published(s, cta)
    return is_last, entries


@cute.jit
def merge(
    s: Selecting, tile: WorkTile, done: Int32, entries: Int32, floor: Uint32
) -> tuple[Part, Int32, Int32]:
    """List published entries as far as the list has room; return (their part and the list's length,
    how much of them is listed, how much of them exists)."""
    if const_expr(s.plan.splits_to_ctas):
        entries, done = list_slots(s, done, entries, floor)
        return Part(Int32(0), tile.length, entries), done, tile.num_splits
    return merged_part(s, entries), done, done


def part_of(tile: WorkTile, entries: Int32, plan: Any) -> Part:
    """The caller's part of the row; of a pair the shorter one may have none of it."""
    first = tile.first_page * PAGE_SIZE
    end = cutlass.min(first + tile.num_pages * PAGE_SIZE, tile.length)
    if plan.pairs:
        end = cutlass.max(first, end)
    return Part(first, end, entries)
