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

from flashdsa.dsl.pipeline import RingProducer
from flashdsa.kernels.indexer import launch
from flashdsa.kernels.indexer.fused import Operands, consume, load, set_up
from flashdsa.kernels.indexer.sm90.load import PAGES, LoadContext
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.kernels.indexer.sm90.score import page_source
from flashdsa.kernels.indexer.sm90.score_pairs import page_source as pair_source
from flashdsa.kernels.indexer.smem_views import input_buffers_in


@cute.kernel
def indexer_kernel(
    keys_map: GridConstant[tensor_map.TensorMap],
    queries_map: GridConstant[tensor_map.TensorMap],
    num_pages: Int32,
    weights: cute.Tensor,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    published: Any,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_indexer` and `launch_splits`."""
    operands = Operands(weights, seq_lens, block_table, topk_indices, published, num_pages)
    x = set_up(keys_map, queries_map, operands, None, plan)
    loads, selects = plan.roles
    # The load role comes first: code more than 64 KB after a kernel's start is slow where it runs
    # first, and the other role is longer than that.
    if not x.caller.consumes:
        cute.arch.setmaxregister_decrease(loads.registers)
        load_ctx = LoadContext(
            input_buffers_in(x.memory, plan, RingProducer),
            keys_map.get_ptr(),
            queries_map.get_ptr(),
            operands.weights,
            operands.block_table,
            operands.num_pages,
            x.scheduled,
            x.caller.warp - plan.consumer_warps,
        )
        # The cluster's barrier: all threads that arrived at it wait, and before they wait for
        # anything else: compute-sanitizer's racecheck lets none of them go on before all have come.
        cute.arch.cluster_wait()
        load(load_ctx, PAGES, x, plan)
    else:
        cute.arch.setmaxregister_increase(selects.registers)
        consume(x, pair_source if const_expr(plan.in_pairs) else page_source, plan)


def compile_indexer(plan: IndexerPlan) -> Any:
    """See `launch.compile_indexer`."""
    return launch.compile_indexer(indexer_kernel, plan)
