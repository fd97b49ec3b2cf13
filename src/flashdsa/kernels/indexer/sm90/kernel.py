"""The fused indexer for Hopper: scores of every key and the exact best of each row, one launch.

A row belongs to a cluster of 1 to 16 CTAs or to an equal part of one, and a part of the row to each
of them (see deal.py).

producer warp             | 4 consumer warpgroups
------------------------- | -----------------------------------------------------------
                          | rows of at most topk tokens: ids without scores
segment head (q, weights) |
pages, up to 12 in flight | score a page, append (key, position), histogram
next segment's head ...   | counts to the other CTAs, theirs back: the row's threshold
"no more"                 | ids of the part's winners, behind those of the parts before
"""

from typing import Any

import cutlass
from cutlass import GridConstant, Int32, Int64, const_expr, cute
from cutlass.experimental import primitives as prims
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.arena import allocate
from flashdsa.dsl.cluster import enter_cluster
from flashdsa.dsl.gmem import prefetch
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.deal import produce_dealt
from flashdsa.kernels.indexer.sm90.emit import Output, emit_unscored_rows
from flashdsa.kernels.indexer.sm90.load import Producer
from flashdsa.kernels.indexer.sm90.maps import make_maps
from flashdsa.kernels.indexer.sm90.memory import inputs_in, mailboxes_in, ranking_in
from flashdsa.kernels.indexer.sm90.order import first_lengths, settle
from flashdsa.kernels.indexer.sm90.place import find_place
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.kernels.indexer.sm90.rank import Consumer, consume
from flashdsa.kernels.indexer.sm90.segments import Rows
from flashdsa.kernels.indexer.sm90.teams import Published
from flashdsa.problem import PAGE_SIZE

LINE_WORDS = 32
"""32-bit words of a cache line."""
INITIALISING_WARPS = 3
"""As many as do not become a jump through a table in constant memory, which takes longer."""


@cute.jit
def prefetch_inputs(
    block_table: cute.Tensor,
    weights: cute.Tensor,
    thread: Int32,
    threads: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Bring what is read behind `seq_lens` into the second-level cache: one of so many threads."""
    lines = (block_table.shape[1] + LINE_WORDS - 1) // LINE_WORDS
    for line in cutlass.range(thread, block_table.shape[0] * lines, threads, unroll=1):
        row = line // lines
        at = Int64(row) * block_table.stride[0] + (line - row * lines) * LINE_WORDS
        prefetch(block_table.iterator + at)
    count = weights.shape[0] * plan.num_heads
    for at in cutlass.range(thread * LINE_WORDS, count, threads * LINE_WORDS, unroll=1):
        prefetch(weights.iterator + at)


@cute.kernel
def indexer_kernel(
    keys_map: GridConstant[tensor_map.TensorMap],
    queries_map: GridConstant[tensor_map.TensorMap],
    weights: cute.Tensor,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    published: Any,
    teams: Any,
    num_pages: Int32,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_indexer` and `launch_teams`."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = thread % WARP_SIZE
    consumes = warp < plan.consumer_warps
    producer_threads = plan.threads - plan.consumer_threads
    if thread == plan.consumer_threads:
        prims.prefetch_tensormap(keys_map.get_ptr())
        prims.prefetch_tensormap(queries_map.get_ptr())
    arena = allocate(plan)
    ranking, mail = ranking_in(arena, plan), mailboxes_in(arena, plan)
    rows = Rows(seq_lens, seq_lens.shape[0], block_table.shape[1] * PAGE_SIZE)
    place = find_place(rows, Int32(1) if const_expr(teams is None) else teams, plan)
    # Asked for before anything else: the way to the first page begins with them.
    lengths = first_lengths(ranking, rows, place, thread, consumes, plan)
    enter_cluster(arena, thread, INITIALISING_WARPS)
    if const_expr(plan.dealt):
        if not consumes:  # the others put rows in order
            prefetch_inputs(
                block_table,
                weights,
                cta * producer_threads + thread - plan.consumer_threads,
                num_ctas * producer_threads,
                plan,
            )
    place = settle(ranking, rows, place, lengths, thread, consumes, plan)
    load, rank = plan.roles
    if consumes:
        cute.arch.setmaxregister_increase(rank.registers)
        output = Output(topk_indices, block_table, num_pages, rows)
        if const_expr(not plan.dealt):
            prefetch_inputs(
                block_table,
                weights,
                cta * plan.consumer_threads + thread,
                num_ctas * plan.consumer_threads,
                plan,
            )
        # From the far end: CTAs without pages, if any, have the highest numbers.
        emit_unscored_rows(
            output,
            (num_ctas - 1 - cta) * plan.consumer_warps + warp,
            num_ctas * plan.consumer_warps,
            lane,
            plan,
        )
        inputs = inputs_in(arena, plan, arena.consumer)
        consume(Consumer(inputs, ranking, mail, place, output, published), thread, plan)
    else:
        cute.arch.setmaxregister_decrease(load.registers)
        producer = Producer(
            inputs_in(arena, plan, arena.producer),
            keys_map.get_ptr(),
            queries_map.get_ptr(),
            weights,
            block_table,
            num_pages,
            rows,
            warp - plan.consumer_warps,
        )
        # All threads that arrived wait, and before what they wait for else: compute-sanitizer's
        # racecheck lets none of them go on before all have come.
        cute.arch.cluster_wait()
        produce_dealt(producer, ranking, place, lengths, lane, plan)


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
        block_table: (B, max_pages) int32, any distance between rows.
        topk_indices: (B, topk) int32, written.
        num_clusters: best so many as run at once. cluster_size: CTAs of each, 1 to 16.
    """
    keys_map, queries_map = make_maps(k_index_cache_fp8, q_index_fp8, plan)
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
def launch_teams(
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
    teams: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`: a long row is several clusters'. Other arguments as in `launch_indexer`.

    Args:
        arrivals: (>= B,) int32, 0, and again behind the launch. slots: (CTAs, slot_words) int32.
        teams: clusters for each long row, num_clusters // B.
    """
    keys_map, queries_map = make_maps(k_index_cache_fp8, q_index_fp8, plan)
    indexer_kernel(
        keys_map,
        queries_map,
        weights,
        seq_lens,
        block_table,
        topk_indices,
        Published(arrivals, slots),
        teams,
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
