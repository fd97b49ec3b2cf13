"""The scores alone, for Blackwell: every token's score into a (B, max_len) matrix, one launch.

load warps           | mma warp                  | 4 consumer warpgroups
-------------------- | ------------------------- | ---------------------------------------
tiles from seq_lens  |                           | -inf beyond the rows' lengths
queries, weights     |                           |
stages of pages      | a stage's products        | sum over heads, store a score a thread
"""

from typing import Any

import cutlass
from cutlass import GridConstant, Int32, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl import tmem
from flashdsa.dsl.arena import allocate, initialise_barriers
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.schedule.page_partition import load_partition
from flashdsa.kernels.indexer.schedule.work_tile import Rows
from flashdsa.kernels.indexer.sizes import INITIALISING_WARPS
from flashdsa.kernels.indexer.sm100.load import PAGES, LoadContext
from flashdsa.kernels.indexer.sm100.mma import allocate_tmem, page_source, run_mma
from flashdsa.kernels.indexer.smem_views import input_buffers_in
from flashdsa.kernels.indexer.tma_maps import make_tensor_maps
from flashdsa.kernels.indexer.write_scores import WriteContext, fill_beyond, write_scores
from flashdsa.problem import PAGE_SIZE


@cute.kernel
def logits_kernel(
    keys_map: GridConstant[tensor_map.TensorMap],
    queries_map: GridConstant[tensor_map.TensorMap],
    cache: cute.Tensor,
    weights: cute.Tensor,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    scores: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_logits`."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = thread % WARP_SIZE
    arena = allocate(plan)
    # A row that is longer than the output is scored up to the output's width.
    max_len = scores.shape[1]
    longest = cutlass.min(block_table.shape[1] * PAGE_SIZE, max_len)
    rows = Rows(seq_lens, seq_lens.shape[0], longest)
    allocate_tmem(arena, warp, plan)
    initialise_barriers(arena, thread, INITIALISING_WARPS)
    cute.arch.sync_threads()
    tmem.after_sync()
    load, _, select = plan.roles
    if warp < plan.consumer_warps:
        cute.arch.setmaxregister_increase(select.registers)
        inputs = input_buffers_in(arena, plan, arena.consumer)
        ctx = WriteContext(inputs, scores, max_len, rows)
        # The last CTA takes the first rows: CTAs without pages, if any, have the highest numbers.
        fill_beyond(
            ctx,
            (num_ctas - 1 - cta) * plan.consumer_warps + warp,
            num_ctas * plan.consumer_warps,
            lane,
        )
        write_scores(ctx, page_source(arena, thread, plan), thread, plan)
    else:
        cute.arch.setmaxregister_decrease(load.registers)
        if warp < plan.consumer_warps + plan.load_warps:
            load_ctx = LoadContext(
                input_buffers_in(arena, plan, arena.producer),
                arena.bytes("scales"),
                keys_map.get_ptr(),
                queries_map.get_ptr(),
                cache,
                weights,
                block_table,
                rows,
                warp - plan.consumer_warps,
            )
            load_partition(load_ctx, PAGES, lane, cta, num_ctas, plan)
        if warp == plan.mma_warp:
            run_mma(arena, plan)


@cute.jit
def launch_logits(
    q_index_fp8: cute.Tensor,
    k_index_cache_fp8: cute.Tensor,
    weights: cute.Tensor,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    scores: cute.Tensor,
    num_ctas: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`.

    Args:
        q_index_fp8: (B, H, 128) e4m3. k_index_cache_fp8: (num_pages, 64, 1, 132) bytes.
        weights: (B, H) fp32. seq_lens: (B,) int32. block_table: (B, max_pages) int32.
        scores: (B, max_len) fp32, written: -inf beyond a row's length and in bad pages.
        num_ctas: CTAs of the grid, best one an SM.
    """
    keys_map, queries_map = make_tensor_maps(k_index_cache_fp8, q_index_fp8, plan)
    logits_kernel(
        keys_map,
        queries_map,
        k_index_cache_fp8,
        weights,
        seq_lens,
        block_table,
        scores,
        plan,
    ).launch(grid=[num_ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream, min_blocks_per_mp=1)
