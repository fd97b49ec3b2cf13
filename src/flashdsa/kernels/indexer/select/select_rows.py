"""The consumers' loop: fill the list with a tile's scores, find the threshold, write the winners.

The loop does not know the source of the scores: `fill` scores pages, or reads given scores.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint32, const_expr, cute

from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.pipeline import PackedPhases
from flashdsa.dsl.static import Static
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.emit.by_position import (
    WarpSpan,
    emit_by_position,
    emit_in_order,
    emit_pair_row,
    own_span,
)
from flashdsa.kernels.indexer.emit.by_score import emit_sorted
from flashdsa.kernels.indexer.emit.output import Output
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
from flashdsa.kernels.indexer.select.row_counts import (
    contribute,
    counts_settle,
    keep_contributed,
)
from flashdsa.kernels.indexer.select.threshold import Threshold, find_threshold
from flashdsa.kernels.indexer.smem_views import (
    SCRATCH_FULLEST,
    ClusterBuffers,
    InputBuffers,
    SelectBuffers,
)
from flashdsa.problem import PAGE_SIZE


class SelectContext(NamedTuple):
    """Role select: waits for page_full and tile_full, arrives at page_empty and tile_empty."""

    inputs: InputBuffers  # the consumer's end
    select: SelectBuffers
    cluster: ClusterBuffers
    coord: Any  # Coord or PackedCoord
    output: Output
    published: Any  # Published; None: a row is one cluster's
    team: Any = None  # Int32: the caller's, of which each selects in a row; None: only one


@cute.jit
def select_rows(
    ctx: SelectContext, source: Any, fill: cutlass.Constexpr, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """Select in every tile that the load warps announce.

    The inner loop has one copy of the search for a threshold: over the caller's part when the list
    is full, over the whole row, with the other CTAs of the group, when the part is scored.

    Args:
        source: of scores, what `fill` takes.
        fill: (ctx, source, batch, entries, floor, thread, plan) lists scores while the list has
            room; returns (entries of the list, the tile's first page that is not listed).
        plan: of a team, if the CTA has several: each selects in its own row of a tile, and all
            compact their lists after the same pages.
    """
    lane = thread % WARP_SIZE
    phases = PackedPhases(Int32(0), Static(EVENTS))  # and the number of the tile
    reset(ctx.select, thread, plan)
    # The cluster's barrier: every CTA of it has initialised its mbarriers, so that messages may be
    # sent to them.
    cute.arch.cluster_wait()
    tile = next_tile(ctx, Int32(0), thread, plan)
    while tile.row >= 0:
        entries, done = Int32(0), Int32(0)  # of the list; pages listed
        floor = Uint32(0)  # keys below it cannot win any more
        selected = cutlass.Boolean(False)
        merges = cutlass.Boolean(False)
        while not selected:
            part = Part(Int32(0), Int32(0), Int32(0))
            stage = tile_stage(ctx, phases)
            last = tile.num_pages
            if not merges:
                batch = Batch(tile, stage, done)
                entries, done = fill(ctx, source, batch, entries, floor, thread, plan)
                part = part_of(tile, entries, plan)
            else:
                part, done, last = merge(ctx, tile, done, entries, floor, thread, plan)
                entries = part.entries
            scored = done == last
            if scored and not merges and lane == 0:
                # tile_empty[stage]: this warp has read queries, weights and description for the
                # last time; `fill` has ended with a sync of all consumers.
                ctx.inputs.tile_ring.release(tile_stage(ctx, phases))
            fullest = ctx.select.scratch[SCRATCH_FULLEST] if const_expr(plan.pairs) else entries
            full = merges or plan.list_capacity - fullest < plan.refill_entries
            # floor 0 says that the list is in the order of positions; a compaction ends that.
            if scored or full or floor == 0:
                publishes, in_order = cutlass.Boolean(False), cutlass.Boolean(False)
                span = WarpSpan(Int32(0), Int32(0), Int32(0))
                if const_expr(ctx.published is not None):
                    publishes = scored and tile.num_splits > 1 and not merges
                if const_expr(plan.lists_in_order):
                    in_order = scored and floor == 0
                    if const_expr(ctx.published is not None):
                        in_order = in_order and tile.num_splits == 1
                    if in_order:
                        span = own_span(ctx.output, tile.row, part, thread, plan)
                here, counts = at_selection(ctx, plan), cutlass.Boolean(False)
                settles = cutlass.Boolean(False)
                shared = scored and here.coord.num_parts > 1
                if const_expr(plan.splits_to_ctas):
                    counts = tile.num_splits > 1 and not merges
                    settles = scored and counts_settle(tile, plan)
                    if counts:
                        contribute(
                            ctx.select, ctx.cluster, ctx.published, floor, settles, thread, plan
                        )
                # A list that is cut down keeps at least topk entries; those of the last bin, too.
                to_bin = publishes or not scored
                threshold, phases = find_threshold(
                    ctx.select,
                    ctx.cluster,
                    here.coord,
                    shared,
                    to_bin,
                    part,
                    phases,
                    thread,
                    plan,
                )
                # An equal key further on has a larger position.
                next_floor = threshold.key + 1
                if const_expr(plan.splits_to_ctas):
                    if counts:
                        threshold, next_floor = raise_threshold(
                            ctx.select, ctx.published, threshold, floor, settles, thread, plan
                        )
                if not scored:
                    entries = cut_down(ctx.select, entries, merges, threshold, thread, plan)
                    floor = next_floor
                    if const_expr(plan.splits_to_ctas):
                        if counts:
                            keep_contributed(ctx.select, ctx.cluster, thread, plan)
                elif publishes:
                    if const_expr(ctx.published is not None):
                        merges, entries = publish_part(
                            here, tile.row, part, threshold, thread, plan
                        )
                        selected = not merges
                        if const_expr(plan.splits_to_ctas):
                            done, floor = Int32(0), Uint32(0)
                else:
                    if has_output(tile, plan):
                        phases = emit_row(
                            here, tile.row, part, in_order, span, threshold, phases, thread, plan
                        )
                    selected = cutlass.Boolean(True)
        reset(ctx.select, thread, plan)
        phases = phases.next_number()
        tile = next_tile(ctx, phases.number, thread, plan)


@cute.jit
def cut_down(
    select: SelectBuffers,
    entries: Int32,
    merges: cutlass.Boolean,
    threshold: Threshold,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> Int32:
    """Keep only the list's accepted entries; return the new length. Ends synced.

    Args:
        merges: the list has published entries, which are appended to it as a whole.
    """
    if const_expr(plan.pairs):
        if merges:
            entries = compact(select, entries, threshold.key, threshold.position, thread, plan)
        else:
            compact_segments(select, threshold, thread, plan)
    else:
        entries = compact(select, entries, threshold.key, threshold.position, thread, plan)
    return entries


@cute.jit
def next_tile(
    ctx: SelectContext, number: Int32, thread: Int32, plan: cutlass.Constexpr
) -> WorkTile:
    """The CTA's tile of that number; of a pair of rows, the part of the caller's row."""
    tile = wait_for_tile(ctx.inputs, number, plan)
    if const_expr(plan.pairs):
        if tile.row >= 0:
            row = 2 * tile.row + ctx.team
            tile = tile._replace(row=row, length=row_length(ctx.output.rows, row))
    return tile


def at_selection(ctx: SelectContext, plan: Any) -> SelectContext:
    """The context with all coordinates that selecting needs."""
    return ctx._replace(coord=ctx.coord.unpacked()) if plan.splits_to_ctas else ctx


def tile_stage(ctx: SelectContext, phases: PackedPhases) -> Int32:
    """The stage of the tile that `phases` numbers, computed anew wherever it is asked for: kept in
    a register through the loops that score, it would make the compiler spill others."""
    number = phases._replace(bits=opaque(phases.bits)).number
    return ctx.inputs.tile_ring.state(number).stage


def has_output(tile: WorkTile, plan: Any) -> Any:
    """False for a row that needed no scores, and was scored because the other row of its pair did:
    its ids are written (see emit_unscored_rows)."""
    return tile.length > plan.unscored_length if plan.pairs else True


@cute.jit
def emit_row(
    ctx: SelectContext,
    row: Int32,
    part: Part,
    in_order: cutlass.Boolean,
    span: WarpSpan,
    threshold: Threshold,
    phases: PackedPhases,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> PackedPhases:
    """Write the ids of the part's winners; return the events' phases after it."""
    select, output, coord = ctx.select, ctx.output, ctx.coord
    if const_expr(plan.sorted):
        winners = compact(select, part.entries, threshold.key, threshold.position, thread, plan)
        phases = emit_sorted(
            select, ctx.cluster, output, row, coord, winners, threshold, phases, thread, plan
        )
    elif in_order:
        emit_in_order(select, output, row, coord, part, span, threshold, thread, plan)
    elif const_expr(plan.pairs):
        emit_pair_row(select, output, row, coord, part, threshold, thread, plan)
    else:
        emit_by_position(select, output, row, coord, part, threshold, thread, plan)
    return phases


@cute.jit
def publish_part(
    ctx: SelectContext,
    row: Int32,
    part: Part,
    threshold: Threshold,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[cutlass.Boolean, Int32]:
    """Publish the part's best. The list in the row's last cluster becomes what the caller selects
    from all clusters' best; if CTAs select alone, it becomes empty in the row's last CTA. Return
    (whether this is the last, entries of the list)."""
    entries = Int32(0)
    if const_expr(plan.splits_to_ctas):
        is_last = publish_alone(ctx.select, ctx.published, part, threshold, thread, plan)
    else:
        cta, _, _ = cute.arch.block_idx()
        publish(ctx.select, ctx.published, cta, part, threshold, thread, plan)
        is_last = announce_published(ctx.cluster, ctx.published, ctx.coord, row, thread, plan)
        if is_last:
            entries = list_published(ctx.select, ctx.published, ctx.coord, cta, thread, plan)
    return is_last, entries


@cute.jit
def merge(
    ctx: SelectContext,
    tile: WorkTile,
    done: Int32,
    entries: Int32,
    floor: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Part, Int32, Int32]:
    """List published entries as far as the list has room; return (their part and the list's length,
    how much of them is listed, how much of them exists)."""
    if const_expr(plan.splits_to_ctas):
        entries, done = list_slots(ctx.select, ctx.published, done, entries, floor, thread, plan)
        return Part(Int32(0), tile.length, entries), done, tile.num_splits
    return merged_part(ctx.select, entries), done, done


def part_of(tile: WorkTile, entries: Int32, plan: Any) -> Part:
    """The caller's part of the row; of a pair the shorter one may have none of it."""
    first = tile.first_page * PAGE_SIZE
    end = cutlass.min(first + tile.num_pages * PAGE_SIZE, tile.length)
    if plan.pairs:
        end = cutlass.max(first, end)
    return Part(first, end, entries)
