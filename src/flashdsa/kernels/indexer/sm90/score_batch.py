"""Pages of a tile scored into the list: the fused kernel's way to fill it."""

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from flashdsa.dsl.opaque import opaque
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.consumers import consumer_sync
from flashdsa.kernels.indexer.schedule.work_tile import word_in
from flashdsa.kernels.indexer.select.list_scores import Batch, ListSink, first_fill, list_score
from flashdsa.kernels.indexer.select.select_rows import SelectContext
from flashdsa.kernels.indexer.sm90.score import PageSpan, Scorer, load_weights, score_span
from flashdsa.kernels.indexer.smem_views import SCRATCH_COUNT
from flashdsa.problem import PAGE_SIZE


@cute.jit
def score_batch(
    ctx: SelectContext,
    scorer: Scorer,
    batch: Batch,
    entries: Int32,
    floor: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """Score as many pages as the list has room for: (its length, the next page). Ends synced."""
    tile = batch.tile
    weights = cute.make_rmem_tensor(plan.num_heads // 4, Float32)
    load_weights(weights, ctx.inputs.weights, batch.stage, thread % WARP_SIZE, plan)
    group = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
    in_order = floor == 0
    room = (plan.list_capacity - entries) // PAGE_SIZE
    if in_order and tile.num_pages > room and ctx.coord.num_parts == 1:
        room = first_fill(plan)
    # Opaque, so that one register holds it through the loops, and not a second one the sum.
    stop = opaque(cutlass.min(tile.num_pages, batch.begin + room))
    # This warpgroup's pages are those whose number in the CTA is `group` modulo the warpgroups.
    groups = plan.consumer_warpgroups
    first_number = word_in(ctx.inputs.tiles, batch.stage, "first_number")
    first = batch.begin + ((group - first_number - batch.begin) & (groups - 1))
    span = PageSpan(
        count=cutlass.max(stop - first + groups - 1, Int32(0)) // groups,
        first_number=first_number + first,
        first_position=(tile.first_page + first) * PAGE_SIZE,
        tile_stage=batch.stage,
    )
    sink = ListSink(ctx.select, tile.first_page * PAGE_SIZE, tile.length, floor, in_order)
    score_span(ctx.inputs, scorer, weights, span, thread, list_score, sink, plan)
    # All consumers: the list is complete up to `stop`, and nobody reads the tile's stage any more.
    consumer_sync(plan)
    if in_order:
        entries = stop * PAGE_SIZE
    else:
        entries = ctx.select.scratch[SCRATCH_COUNT]
        consumer_sync(plan)  # everyone has read the count, so that it may be written again
    return entries, stop
