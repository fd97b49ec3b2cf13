"""The attention's target on Hopper GPUs."""

from __future__ import annotations

from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.head_sums import head_sums
from flashdsa.operands import AttentionTargetOperands


def attention_target(
    runner: Runner, operands: AttentionTargetOperands, *, sm_scale: float
) -> Tensor:
    """P (S, topk) fp32 = sum_h exp(sm_scale q . kv - lse'), 0 where a slot is invalid."""
    q, kv, lse, indices, topk_length, attn_sink = operands
    return head_sums(runner, q, kv, indices, topk_length, lse, attn_sink, sm_scale)
