"""The fused indexer for Blackwell: scores of every key and the exact best of each row, one launch.

A row belongs to a cluster of 1 to 16 CTAs or to an equal part of one, and a part of the row, a work
tile, to each of them (see load_tiles.py). Only the loading and scoring roles differ
from the Hopper kernel's.

load warps                | mma warp           | 4 consumer warpgroups
------------------------- | ------------------ | ------------------------------------------------
                          |                    | rows of at most topk tokens: ids without scores
a tile's head: q, weights |                    |
stages of pages           | stage's products   | sum over heads, append (key, position), histogram
the next tile's head ...  |                    | counts to the other CTAs, theirs back: threshold
"no more"                 | gives TMEM back    | ids of the part's winners
"""

from typing import Any

import cutlass
from cutlass import GridConstant, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.pipeline import RingProducer
from flashdsa.kernels.indexer import launch
from flashdsa.kernels.indexer.fused import Operands, consume, load, set_up
from flashdsa.kernels.indexer.sm100.gather import loader_of
from flashdsa.kernels.indexer.sm100.load import LoadContext
from flashdsa.kernels.indexer.sm100.mma import allocate_tmem, page_source, run_mma
from flashdsa.kernels.indexer.sm100.plan import IndexerPlan
from flashdsa.kernels.indexer.smem_views import input_buffers_in


@cute.kernel
def indexer_kernel(
    keys_map: GridConstant[tensor_map.TensorMap],
    queries_map: GridConstant[tensor_map.TensorMap],
    cache: cute.Tensor,
    weights: cute.Tensor,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    published: Any,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_indexer` and `launch_splits`."""
    operands = Operands(weights, seq_lens, block_table, topk_indices, published, cache.shape[0])
    x = set_up(keys_map, queries_map, operands, allocate_tmem, plan)
    loads, _, selects = plan.roles
    if x.caller.consumes:
        cute.arch.setmaxregister_increase(selects.registers)
        consume(x, page_source, plan)
    else:
        cute.arch.setmaxregister_decrease(loads.registers)
        # The cluster's barrier: all threads that arrived at it wait, and before they wait for
        # anything else: compute-sanitizer's racecheck lets none of them go on before all have come.
        cute.arch.cluster_wait()
        if x.caller.warp < plan.consumer_warps + plan.load_warps:
            load_ctx = LoadContext(
                input_buffers_in(x.memory, plan, RingProducer),
                x.memory.scales.bytes(),
                keys_map.get_ptr(),
                queries_map.get_ptr(),
                cache,
                weights,
                block_table,
                x.scheduled,
                x.caller.warp - plan.consumer_warps,
            )
            load(load_ctx, loader_of(plan), x, plan)
        if x.caller.warp == plan.mma_warp:
            run_mma(x.memory, plan)


def compile_indexer(plan: IndexerPlan) -> Any:
    """See `launch.compile_indexer`."""
    return launch.compile_indexer(indexer_kernel, plan)
