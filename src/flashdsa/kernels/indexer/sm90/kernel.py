"""The fused indexer for Hopper: scores of every key and the exact best of each row, one launch.

producer warp             | 4 consumer warpgroups
------------------------- | -----------------------------------------------------------
schedule from seq_lens    | rows of at most topk tokens: ids without scores
segment head (q, weights) |
pages, up to 12 in flight | score a page, append (key, position), histogram
next segment's head ...   | rank; publish if the row is shared; the last CTA merges
"no more"                 | emit ids
"""

from typing import Any

import cutlass
from cutlass import GridConstant, Int32, Int64, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.kernels.indexer.sm90.emit import Output, emit_unscored_rows
from flashdsa.kernels.indexer.sm90.load import Producer, produce
from flashdsa.kernels.indexer.sm90.maps import make_maps
from flashdsa.kernels.indexer.sm90.memory import Pipeline, allocate
from flashdsa.kernels.indexer.sm90.merge import Workspace
from flashdsa.kernels.indexer.sm90.plan import WARP_SIZE, IndexerPlan
from flashdsa.kernels.indexer.sm90.rank import Consumer, consume
from flashdsa.kernels.indexer.sm90.schedule import Rows
from flashdsa.problem import PAGE_SIZE

LINE_WORDS = 32
"""32-bit words of a cache line."""


def initialise_barriers(pipeline: Pipeline, plan: IndexerPlan) -> None:
    """One thread: every barrier with the arrivals that the plan derives from who arrives."""
    for barrier in plan.barriers:
        for stage in range(barrier.stages):
            cute.arch.mbarrier_init(getattr(pipeline, barrier.name) + stage, barrier.arrivals)


@cute.jit
def prefetch_inputs(
    block_table: cute.Tensor,
    weights: cute.Tensor,
    thread: Int32,
    num_ctas: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Bring what is read behind `seq_lens` into the second-level cache; `thread` is of the grid."""
    threads = num_ctas * plan.consumer_threads
    lines = (block_table.shape[1] + LINE_WORDS - 1) // LINE_WORDS
    for line in cutlass.range(thread, block_table.shape[0] * lines, threads, unroll=1):
        row = line // lines
        at = Int64(row) * block_table.stride[0] + (line - row * lines) * LINE_WORDS
        cute.arch.inline_ptx(
            "prefetch.global.L2 [{$r0}];", read_only_args=[block_table.iterator + at]
        )
    count = weights.shape[0] * plan.num_heads
    for at in cutlass.range(thread * LINE_WORDS, count, threads * LINE_WORDS, unroll=1):
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[weights.iterator + at])


@cute.kernel
def indexer_kernel(
    keys_map: GridConstant[tensor_map.TensorMap],
    queries_map: GridConstant[tensor_map.TensorMap],
    weights: cute.Tensor,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    arrivals: cute.Tensor,
    lists: cute.Tensor,
    num_pages: Int32,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_indexer`."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = thread % WARP_SIZE
    ranking, pipeline = allocate(plan)
    rows = Rows(seq_lens, seq_lens.shape[0], block_table.shape[1] * PAGE_SIZE)
    if thread == 0:
        initialise_barriers(pipeline, plan)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == plan.consumer_warps:
        produce(
            Producer(
                pipeline,
                keys_map.get_ptr(),
                queries_map.get_ptr(),
                weights,
                block_table,
                num_pages,
                rows,
            ),
            lane,
            cta,
            num_ctas,
            plan,
        )
    else:
        output = Output(topk_indices, block_table, num_pages, rows)
        prefetch_inputs(block_table, weights, cta * plan.consumer_threads + thread, num_ctas, plan)
        # From the far end: CTAs without pages, if any, have the highest numbers.
        emit_unscored_rows(
            output,
            (num_ctas - 1 - cta) * plan.consumer_warps + warp,
            num_ctas * plan.consumer_warps,
            lane,
            plan,
        )
        consume(Consumer(pipeline, ranking, Workspace(arrivals, lists), output), thread, plan)


@cute.jit
def launch_indexer(
    q_index_fp8: cute.Tensor,
    k_index_cache_fp8: cute.Tensor,
    weights: cute.Tensor,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    arrivals: cute.Tensor,
    lists: cute.Tensor,
    num_ctas: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`.

    Args:
        q_index_fp8: (B, H, 128) e4m3. k_index_cache_fp8: (num_pages, 64, 1, 132) bytes.
        weights: (B, H) fp32. seq_lens: (B,) int32.
        block_table: (B, max_pages) int32, any distance between rows.
        topk_indices: (B, topk) int32, written.
        arrivals: (>= B,) int32, 0. lists: (SLOTS_PER_CTA * num_ctas, slot_words) int32.
        num_ctas: CTAs of the grid, at most one an SM.
    """
    keys_map, queries_map = make_maps(k_index_cache_fp8, q_index_fp8, plan)
    indexer_kernel(
        keys_map,
        queries_map,
        weights,
        seq_lens,
        block_table,
        topk_indices,
        arrivals,
        lists,
        k_index_cache_fp8.shape[0],
        plan,
    ).launch(grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1)
