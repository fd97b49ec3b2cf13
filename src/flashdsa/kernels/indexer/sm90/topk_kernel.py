"""Exact top-k of given scores, for Hopper: the fused indexer's selection without its scoring.

load warp  | 4 consumer warpgroups
---------- | -----------------------------------------------------------------
           | rows of at most topk scores: all positions
work tiles | append (key, position), histogram; the row's threshold; positions
"""

from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.arena import allocate
from flashdsa.dsl.cluster import enter_cluster
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.emit.output import Output, emit_unscored_rows
from flashdsa.kernels.indexer.schedule.coord import find_coord
from flashdsa.kernels.indexer.schedule.row_schedule import first_lengths, schedule_rows
from flashdsa.kernels.indexer.schedule.scheduled_tiles import load_scheduled
from flashdsa.kernels.indexer.schedule.work_tile import Rows
from flashdsa.kernels.indexer.select.read_scores import read_batch
from flashdsa.kernels.indexer.select.select_rows import SelectContext, select_rows
from flashdsa.kernels.indexer.sizes import INITIALISING_WARPS
from flashdsa.kernels.indexer.sm90.load import DESCRIPTIONS, LoadContext
from flashdsa.kernels.indexer.smem_views import (
    cluster_buffers_in,
    select_buffers_in,
    tile_buffers_in,
)


@cute.kernel
def topk_kernel(
    scores: cute.Tensor,
    lengths: cute.Tensor,
    positions: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_topk`."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = thread % WARP_SIZE
    arena = allocate(plan)
    select, cluster = select_buffers_in(arena, plan), cluster_buffers_in(arena, plan)
    rows = Rows(lengths, lengths.shape[0], scores.shape[1])
    coord = find_coord(rows, Int32(1), plan)
    consumes = warp < plan.consumer_warps
    lengths_asked_for = first_lengths(select, rows, coord, thread, consumes, plan)
    enter_cluster(arena, thread, INITIALISING_WARPS)
    coord = schedule_rows(select, rows, coord, lengths_asked_for, thread, consumes, plan)
    if consumes:
        output = Output(positions, None, None, Int32(0), rows)
        # The last CTA takes the first rows: CTAs without tiles, if any, have the highest numbers.
        emit_unscored_rows(
            output,
            (num_ctas - 1 - cta) * plan.consumer_warps + warp,
            num_ctas * plan.consumer_warps,
            lane,
            plan,
        )
        inputs = tile_buffers_in(arena, plan, arena.consumer)
        ctx = SelectContext(inputs, select, cluster, coord, output, None)
        select_rows(ctx, scores, read_batch, thread, plan)
    else:
        inputs = tile_buffers_in(arena, plan, arena.producer)
        load_warp = warp - plan.consumer_warps
        load_ctx = LoadContext(inputs, None, None, None, None, Int32(0), rows, load_warp)
        cute.arch.cluster_wait()  # here for the same reason as in the fused kernel
        load_scheduled(load_ctx, DESCRIPTIONS, select, coord, lengths_asked_for, lane, plan)


@cute.jit
def launch_topk(
    scores: cute.Tensor,
    lengths: cute.Tensor,
    positions: cute.Tensor,
    num_clusters: Int32,
    cluster_size: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`.

    Args:
        scores: (B, max_len) fp32, any distance between rows. lengths: (B,) int32.
        positions: (B, topk) int32, written.
        num_clusters, cluster_size: as in `launch_indexer`.
    """
    topk_kernel(scores, lengths, positions, plan).launch(
        grid=[num_clusters * cluster_size, 1, 1],
        block=[plan.threads, 1, 1],
        cluster=[cluster_size, 1, 1],
        stream=stream,
        min_blocks_per_mp=1,
    )
