"""The fused indexer for Hopper: scores of every key and the exact best of each row, one launch.

A row belongs to a cluster of 1 to 16 CTAs or to an equal part of one, and a part of the row, a work
tile, to each of them (see load_tiles.py).

4 load warps              | 4 consumer warpgroups
------------------------- | -----------------------------------------------------------
                          | rows of at most topk tokens: ids without scores
a tile's head: q, weights |
pages, up to 12 in flight | score a page, append (key, position), histogram
the next tile's head ...  | counts to the other CTAs, theirs back: the row's threshold
"no more"                 | ids of the part's winners, after those of the parts before
"""

from typing import Any

import cutlass
from cutlass import GridConstant, Int32, const_expr, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.arena import allocate
from flashdsa.dsl.cluster import enter_cluster
from flashdsa.kernels.indexer.fused import (
    Operands,
    consume,
    find_caller,
    prefetch_maps,
    prefetch_meanwhile,
)
from flashdsa.kernels.indexer.load_tiles import load_scheduled
from flashdsa.kernels.indexer.plan import By
from flashdsa.kernels.indexer.schedule.coord import find_coord
from flashdsa.kernels.indexer.schedule.row_schedule import first_lengths, schedule_rows
from flashdsa.kernels.indexer.schedule.work_tile import pairs_of, rows_of
from flashdsa.kernels.indexer.select.published import Published
from flashdsa.kernels.indexer.sizes import INITIALISING_WARPS
from flashdsa.kernels.indexer.sm90.load import PAGES, LoadContext
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.kernels.indexer.sm90.score import page_source
from flashdsa.kernels.indexer.sm90.score_pairs import page_source as pair_source
from flashdsa.kernels.indexer.smem_views import (
    cluster_buffers_in,
    input_buffers_in,
    select_buffers_in,
)
from flashdsa.kernels.indexer.tma_maps import make_tensor_maps


@cute.kernel
def indexer_kernel(
    keys_map: GridConstant[tensor_map.TensorMap],
    queries_map: GridConstant[tensor_map.TensorMap],
    weights: cute.Tensor,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    published: Any,
    num_splits: Any,
    num_pages: Int32,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_indexer` and `launch_splits`."""
    caller = find_caller(plan)
    prefetch_maps(caller, keys_map, queries_map, plan)
    arena = allocate(plan)
    select, cluster = select_buffers_in(arena, plan), cluster_buffers_in(arena, plan)
    rows = rows_of(seq_lens, block_table)
    operands = Operands(weights, block_table, topk_indices, published, num_pages, rows)
    if const_expr(plan.rows is By.PAIRS):
        rows = pairs_of(rows)
    coord = find_coord(rows, num_splits if const_expr(plan.rows is By.CLUSTERS) else Int32(1), plan)
    # Asked for before anything else: the path to the first page begins with the lengths.
    lengths = first_lengths(select, rows, coord, caller.thread, caller.consumes, plan)
    enter_cluster(arena, caller.thread, INITIALISING_WARPS)
    prefetch_meanwhile(caller, operands, plan)
    coord = schedule_rows(select, rows, coord, lengths, caller.thread, caller.consumes, plan)
    load, role = plan.roles
    # The load role comes first: code more than 64 KB after a kernel's start is slow where it runs
    # first, and the other role is longer than that.
    if not caller.consumes:
        cute.arch.setmaxregister_decrease(load.registers)
        load_ctx = LoadContext(
            input_buffers_in(arena, plan, arena.producer),
            keys_map.get_ptr(),
            queries_map.get_ptr(),
            weights,
            block_table,
            num_pages,
            rows,
            caller.warp - plan.consumer_warps,
        )
        # The cluster's barrier: all threads that arrived at it wait, and before they wait for
        # anything else: compute-sanitizer's racecheck lets none of them go on before all have come.
        cute.arch.cluster_wait()
        load_scheduled(load_ctx, PAGES, select, coord, lengths, caller.lane, plan)
    else:
        cute.arch.setmaxregister_increase(role.registers)
        source = pair_source if const_expr(plan.rows is By.PAIRS) else page_source
        consume(caller, arena, select, cluster, coord, operands, source, plan)


@cute.jit
def launch_indexer(
    q_index_fp8: cute.Tensor,
    k_index_cache_fp8: cute.Tensor,
    weights: cute.Tensor,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    num_clusters: Int32,
    cluster_size: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`: a row is one cluster's.

    Args:
        q_index_fp8: (B, H, 128) e4m3. k_index_cache_fp8: (num_pages, 64, 1, 132) bytes.
        weights: (B, H) fp32. seq_lens: (B,) int32.
        block_table: (B / next_n, max_pages) int32, any distance between rows.
        topk_indices: (B, topk) int32, written.
        num_clusters: best the number that runs at once. cluster_size: CTAs of each, 1 to 16.
    """
    keys_map, queries_map = make_tensor_maps(k_index_cache_fp8, q_index_fp8, plan)
    indexer_kernel(
        keys_map,
        queries_map,
        weights,
        seq_lens,
        block_table,
        topk_indices,
        None,
        None,
        k_index_cache_fp8.shape[0],
        plan,
    ).launch(**launch_shape(num_clusters, cluster_size, plan), stream=stream)


@cute.jit
def launch_splits(
    q_index_fp8: cute.Tensor,
    k_index_cache_fp8: cute.Tensor,
    weights: cute.Tensor,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    arrivals: cute.Tensor,
    slots: cute.Tensor,
    num_clusters: Int32,
    cluster_size: Int32,
    num_splits: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`: several clusters share a long row. Other arguments as in
    `launch_indexer`.

    Args:
        arrivals: counters, 0 before and after the launch: (>= B,) int32, or of a scheduled kernel
            (CTAs * ROW_COUNTERS,). slots: (CTAs, slot_words) int32.
        num_splits: clusters of each long row, num_clusters // B; a scheduled kernel looks at the
            lengths instead.
    """
    keys_map, queries_map = make_tensor_maps(k_index_cache_fp8, q_index_fp8, plan)
    indexer_kernel(
        keys_map,
        queries_map,
        weights,
        seq_lens,
        block_table,
        topk_indices,
        Published(arrivals, slots),
        num_splits,
        k_index_cache_fp8.shape[0],
        plan,
    ).launch(**launch_shape(num_clusters, cluster_size, plan), stream=stream)


def launch_shape(num_clusters: Int32, cluster_size: Int32, plan: IndexerPlan) -> dict[str, Any]:
    """Grid, CTA and cluster of a launch."""
    return {
        "grid": [num_clusters * cluster_size, 1, 1],
        "block": [plan.threads, 1, 1],
        "cluster": [cluster_size, 1, 1],
        "min_blocks_per_mp": 1,
    }
