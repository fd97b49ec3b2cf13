"""The scores alone, for Hopper: every token's into a (B, max_len) matrix, or every block's best.

Two rows of a request may be scored together, for the ranking that follows (topk_kernel.py).

4 load warps: as in the fused kernel | 4 consumer warpgroups
------------------------------------ | -----------------------------------------
partition of pages from seq_lens     | -inf beyond the rows' lengths
heads of tiles, pages                | score a page, store 64 scores
"""

from typing import Any

import cutlass
from cutlass import Float32, GridConstant, Int32, const_expr, cute
from cutlass.experimental.cuda import tensor_map

from flashdsa.dsl.memory import initialise_barriers
from flashdsa.dsl.pipeline import RingConsumer, RingProducer
from flashdsa.kernels.indexer import launch
from flashdsa.kernels.indexer.fused import find_caller
from flashdsa.kernels.indexer.schedule.page_partition import load_partition
from flashdsa.kernels.indexer.schedule.work_tile import pairs_of, rows_of
from flashdsa.kernels.indexer.sizes import INITIALISING_WARPS
from flashdsa.kernels.indexer.sm90.block_scores import LANES_APART, best_of_block
from flashdsa.kernels.indexer.sm90.load import PAGES, LoadContext
from flashdsa.kernels.indexer.sm90.plan import BLOCK, LogitsPlan
from flashdsa.kernels.indexer.sm90.score import page_source
from flashdsa.kernels.indexer.sm90.score_pairs import page_source as pair_source
from flashdsa.kernels.indexer.smem_views import IndexerMemory, input_buffers_in
from flashdsa.kernels.indexer.write_scores import (
    OutputSink,
    WriteContext,
    consume_pages,
    rows_to_score,
    store_score,
    write_of_pair,
    write_scores,
)


@cute.kernel
def logits_kernel(
    keys_map: GridConstant[tensor_map.TensorMap],
    queries_map: GridConstant[tensor_map.TensorMap],
    num_pages: Int32,
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
    if const_expr(plan.teams > 1):
        rows = rows_of(seq_lens, block_table)
    else:
        rows = rows_to_score(seq_lens, block_table, max_len * plan.tokens_of_score)
    initialise_barriers(memory, caller.thread, INITIALISING_WARPS)
    cute.arch.sync_threads()
    loads, selects = plan.roles
    if not caller.consumes:
        cute.arch.setmaxregister_decrease(loads.registers)
        load_ctx = LoadContext(
            input_buffers_in(memory, plan, RingProducer),
            keys_map.get_ptr(),
            queries_map.get_ptr(),
            weights,
            block_table,
            num_pages,
            pairs_of(rows) if const_expr(plan.teams > 1) else rows,
            caller.warp - plan.consumer_warps,
        )
        if const_expr(plan.teams > 1):
            # The ranking may take each SM that is free, and prepare itself there.
            cute.arch.griddepcontrol_launch_dependents()
        load_partition(load_ctx, PAGES, caller.lane, caller.cta, caller.num_ctas, plan)
    else:
        cute.arch.setmaxregister_increase(selects.registers)
        inputs = input_buffers_in(memory, plan, RingConsumer)
        ctx = WriteContext(inputs, scores, max_len, rows)
        if const_expr(plan.of_blocks):
            source = page_source(memory, caller.thread, plan)
            write_scores(ctx, source, caller.thread, write_block, plan)
        elif const_expr(plan.teams > 1):
            source = pair_source(memory, caller.thread, plan)
            write_scores(ctx, source, caller.thread, write_of_pair, plan)
        else:
            consume_pages(ctx, caller, memory, page_source, plan)


@cute.jit
def write_block(
    sink: OutputSink,
    score: Float32,
    position: Int32,
    valid: cutlass.Boolean,
    present: cutlass.Boolean,
) -> None:
    """Write a block's best score to its number in the row; of a page outside the cache, NaN.

    All lanes call. Nothing is written beyond the row's blocks.
    """
    seen = present and position < sink.length
    if not (valid and seen):
        score = Float32.nan
    best = best_of_block(score)
    if seen and cute.arch.lane_idx() < LANES_APART[0]:
        store_score(sink.ctx, sink.row, position // BLOCK, best)


def compile_logits(plan: LogitsPlan) -> Any:
    """See `launch.compile_logits`."""
    return launch.compile_logits(logits_kernel, plan)
