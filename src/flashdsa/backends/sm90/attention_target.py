"""The attention's target on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.backends.memory import aligned, lie_densely
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import ATTENTION_TARGET
from flashdsa.kernels.indexer_training.sm90.head_sums import plan
from flashdsa.plan.row_tiles import TILE_ROWS

if TYPE_CHECKING:
    from flashdsa.ops.indexer_training import AttentionTargetOperands


@cache
def plan_for(num_heads: int, width: int) -> plan.TargetPlan:
    """The plan with the fewest columns for `num_heads` heads, and rows of `width`."""
    return plan.target_plan(next(size for size in plan.TARGET_HEADS if size >= num_heads), width)


def bind(
    runner: Runner, operands: AttentionTargetOperands, *, sm_scale: float
) -> Callable[[AttentionTargetOperands], Tensor]:
    """P (S, topk) fp32 = sum_h exp(sm_scale q . kv - lse'), 0 where a slot is invalid."""
    num_queries, topk = operands.indices.shape
    if not operands.kv.shape[0] or not operands.indices.numel():
        return lambda _: runner.empty(num_queries, topk, dtype=torch.float32).zero_()
    function = runner.function(ATTENTION_TARGET, plan_for(*operands.q.shape[1:]))
    every = runner.empty(0, dtype=torch.int32)
    no_sink = runner.empty(0, dtype=torch.float32)
    num_ctas = min(num_queries * -(-topk // TILE_ROWS), runner.num_sms)
    empty_target = runner.allocator(num_queries, topk, dtype=torch.float32)
    dense = lie_densely(operands)

    def serve(operands: AttentionTargetOperands) -> Tensor:
        q, kv, lse, indices, topk_length, attn_sink = operands
        lengths = every if topk_length is None else topk_length
        sink = no_sink if attn_sink is None else attn_sink
        if not dense:
            q, kv, lse, indices = (x.contiguous() for x in (q, kv, lse, indices))
            lengths, sink = lengths.contiguous(), sink.contiguous()
        out = empty_target()
        function(aligned(q), aligned(kv), indices, lengths, lse, sink, out, sm_scale, num_ctas)
        return out

    return runner.on_device(serve)
