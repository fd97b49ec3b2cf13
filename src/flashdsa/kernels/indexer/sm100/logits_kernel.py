"""The scores alone, for Blackwell: every token's score into a (B, max_len) matrix, one launch.

load warps           | mma warp                  | 4 consumer warpgroups
-------------------- | ------------------------- | ---------------------------------------
tiles from seq_lens  |                           | -inf beyond the rows' lengths
queries, weights     |                           |
stages of pages      | a stage's products        | sum over heads, store a score a thread
"""

from typing import Any

import cutlass
from cutlass import GridConstant, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl import tmem
from flashdsa.dsl.memory import initialise_barriers
from flashdsa.dsl.pipeline import RingConsumer, RingProducer
from flashdsa.kernels.indexer import launch
from flashdsa.kernels.indexer.fused import find_caller
from flashdsa.kernels.indexer.schedule.page_partition import load_partition
from flashdsa.kernels.indexer.sizes import INITIALISING_WARPS
from flashdsa.kernels.indexer.sm100.gather import loader_of
from flashdsa.kernels.indexer.sm100.load import LoadContext
from flashdsa.kernels.indexer.sm100.mma import allocate_tmem, page_source, run_mma
from flashdsa.kernels.indexer.sm100.plan import LogitsPlan
from flashdsa.kernels.indexer.smem_views import IndexerMemory, input_buffers_in
from flashdsa.kernels.indexer.write_scores import WriteContext, consume_pages, rows_to_score


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
    caller = find_caller(plan)
    memory = IndexerMemory.allocate(plan)
    max_len = scores.shape[1]
    rows = rows_to_score(seq_lens, block_table, max_len, plan.entry_tokens)
    allocate_tmem(memory, caller.warp, plan)
    initialise_barriers(memory, caller.thread, INITIALISING_WARPS)
    cute.arch.sync_threads()
    tmem.after_sync()
    loads, _, selects = plan.roles
    if caller.consumes:
        cute.arch.setmaxregister_increase(selects.registers)
        inputs = input_buffers_in(memory, plan, RingConsumer)
        ctx = WriteContext(inputs, scores, max_len, rows)
        consume_pages(ctx, caller, memory, page_source, plan)
    else:
        cute.arch.setmaxregister_decrease(loads.registers)
        if caller.warp < plan.consumer_warps + plan.load_warps:
            load_ctx = LoadContext(
                input_buffers_in(memory, plan, RingProducer),
                memory.scales.bytes(),
                keys_map.get_ptr(),
                queries_map.get_ptr(),
                cache,
                weights,
                block_table,
                rows,
                caller.warp - plan.consumer_warps,
            )
            load_partition(
                load_ctx, loader_of(plan), caller.lane, caller.cta, caller.num_ctas, plan
            )
        if caller.warp == plan.mma_warp:
            run_mma(memory, plan)


def compile_logits(plan: LogitsPlan) -> Any:
    """See `launch.compile_logits`."""
    return launch.compile_logits(logits_kernel, plan)
