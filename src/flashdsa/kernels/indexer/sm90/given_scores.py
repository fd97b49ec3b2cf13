"""A CTA that ranks given scores: the fused indexer's schedule and selection without its scoring."""

from typing import Any

import cutlass
from cutlass import Int32, const_expr, cute

from flashdsa.dsl.cluster import enter_cluster
from flashdsa.dsl.pipeline import RingConsumer, RingProducer
from flashdsa.dsl.static import Static
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import Selecting
from flashdsa.kernels.indexer.emit.output import Output, emit_unscored_rows
from flashdsa.kernels.indexer.load_tiles import load_scheduled
from flashdsa.kernels.indexer.schedule.coord import find_coord
from flashdsa.kernels.indexer.schedule.row_schedule import first_lengths, schedule_rows
from flashdsa.kernels.indexer.select.by_cluster import select_by_cluster
from flashdsa.kernels.indexer.select.tiles import select_tiles
from flashdsa.kernels.indexer.sizes import INITIALISING_WARPS
from flashdsa.kernels.indexer.sm90.load import DESCRIPTIONS, LoadContext
from flashdsa.kernels.indexer.smem_views import (
    IndexerMemory,
    cluster_buffers_in,
    select_buffers_in,
    tile_buffers_in,
)


@cute.jit
def rank_scores(
    memory: IndexerMemory,
    output: Output,
    source: Any,
    fill: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """All threads of a CTA: its tiles of the output's rows, one cluster's each.

    Args:
        source, fill: see select/tiles.py.
    """
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane, rows = thread % WARP_SIZE, output.rows
    select, cluster = select_buffers_in(memory, plan), cluster_buffers_in(memory, plan)
    coord = find_coord(rows, plan)
    consumes = warp < plan.consumer_warps
    lengths = first_lengths(select, rows, coord, thread, consumes, plan)
    enter_cluster(memory, thread, INITIALISING_WARPS)
    coord = schedule_rows(select, rows, coord, lengths, thread, consumes, plan)
    if consumes:
        # The last CTA takes the first rows: CTAs without tiles, if any, have the highest numbers.
        emit_unscored_rows(
            output,
            (num_ctas - 1 - cta) * plan.consumer_warps + warp,
            num_ctas * plan.consumer_warps,
            lane,
            plan,
        )
        inputs = tile_buffers_in(memory, plan, RingConsumer)
        if const_expr(plan.of_cache):
            # The launch that scores, which this one may follow early, has ended.
            cute.arch.griddepcontrol_wait()
        s = Selecting(inputs, select, cluster, coord, output, None, thread, Static(plan))
        select_tiles(s, source, fill, select_by_cluster)
    else:
        inputs = tile_buffers_in(memory, plan, RingProducer)
        load_warp = warp - plan.consumer_warps
        load_ctx = LoadContext(inputs, None, None, None, None, Int32(0), rows, load_warp)
        cute.arch.cluster_wait()  # here for the same reason as in the fused kernel
        load_scheduled(load_ctx, DESCRIPTIONS, select, coord, lengths, lane, plan)
