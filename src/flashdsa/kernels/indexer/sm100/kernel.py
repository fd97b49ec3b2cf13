"""The kernels for Blackwell that score pages. Only loading and scoring differ from Hopper's.

The fused indexer: scores of every key and the exact best of each row, one launch. A row belongs to
a cluster of 1 to 16 CTAs or to an equal part of one, and a part of the row, a work tile, to each of
them (see load_tiles.py).

load warps                | mma warp           | 4 consumer warpgroups
------------------------- | ------------------ | ------------------------------------------------
                          |                    | rows of at most topk tokens: ids without scores
a tile's head: q, weights |                    |
stages of pages           | stage's products   | sum over heads, append (key, position), histogram
the next tile's head ...  |                    | counts to the other CTAs, theirs back: threshold
"no more"                 | gives TMEM back    | ids of the part's winners

The scores alone: every token's score into a (B, max_len) matrix, one launch. The consumers write
-inf beyond the rows' lengths, and store a score a thread.
"""

from typing import Any

import cutlass
from cutlass import GridConstant, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl import pipeline, tmem
from flashdsa.dsl.memory import Memory, initialise_barriers
from flashdsa.kernels.indexer import fused, launch, load_tiles, sizes, smem_views, write_scores
from flashdsa.kernels.indexer.sm100 import load, score
from flashdsa.kernels.indexer.sm100.plan import IndexerPlan, LogitsPlan


@cute.kernel
def indexer_kernel(
    keys_map: GridConstant[tensor_map.TensorMap],
    queries_map: GridConstant[tensor_map.TensorMap],
    pages: load_tiles.Pages,
    results: fused.Results,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_indexer`."""
    x = fused.set_up(keys_map, queries_map, pages, results, score.allocate_tmem, plan)
    loads, _, selects = plan.roles
    if x.caller.consumes:
        cute.arch.setmaxregister_increase(selects.registers)
        fused.consume(x, score.page_source, plan)
    else:
        cute.arch.setmaxregister_decrease(loads.registers)
        # The cluster's barrier: all threads that arrived at it wait, and before they wait for
        # anything else: compute-sanitizer's racecheck lets none of them go on before all have come.
        cute.arch.cluster_wait()
        if x.caller.warp < plan.consumer_warps + plan.load_warps:
            maps, lane = (keys_map, queries_map), x.caller.lane
            ctx = load_tiles.loading(x.memory, maps, pages, x.rows, x.caller.warp, plan)
            loader = load.loader_of(plan)
            load_tiles.load_scheduled(ctx, loader, x.select, x.coord, x.lengths, lane, plan)
        if x.caller.warp == plan.mma_warp:
            score.run_mma(x.memory, plan)


def compile_indexer(plan: IndexerPlan) -> Any:
    """See `launch.compile_indexer`."""
    return launch.compile_indexer(indexer_kernel, plan)


@cute.kernel
def logits_kernel(
    keys_map: GridConstant[tensor_map.TensorMap],
    queries_map: GridConstant[tensor_map.TensorMap],
    pages: load_tiles.Pages,
    scores: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_logits`."""
    caller = fused.find_caller(plan)
    memory = Memory.allocate(plan)
    max_len = scores.shape[1]
    rows = write_scores.rows_to_score(pages.seq_lens, pages.block_table, max_len, plan.entry_tokens)
    score.allocate_tmem(memory, caller.warp, plan)
    initialise_barriers(memory, caller.thread, sizes.INITIALISING_WARPS)
    cute.arch.sync_threads()
    tmem.after_sync()
    loads, _, selects = plan.roles
    if caller.consumes:
        cute.arch.setmaxregister_increase(selects.registers)
        inputs = smem_views.input_buffers_in(memory, plan, pipeline.RingConsumer)
        ctx = write_scores.WriteContext(inputs, scores, max_len, rows)
        write_scores.consume_pages(ctx, caller, memory, score.page_source, plan)
    else:
        cute.arch.setmaxregister_decrease(loads.registers)
        if caller.warp < plan.consumer_warps + plan.load_warps:
            maps = keys_map, queries_map
            load_ctx = load_tiles.loading(memory, maps, pages, rows, caller.warp, plan)
            place = caller.lane, caller.cta, caller.num_ctas
            write_scores.load_partition(load_ctx, load.loader_of(plan), *place, plan)
        if caller.warp == plan.mma_warp:
            score.run_mma(memory, plan)


def compile_logits(plan: LogitsPlan) -> Any:
    """See `launch.compile_logits`."""
    return launch.compile_logits(logits_kernel, plan)
