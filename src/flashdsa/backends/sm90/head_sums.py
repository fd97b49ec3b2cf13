"""Launches of the kernels that sum over heads at the slots of each query."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import ATTENTION_TARGET, INDEXER_SCORES
from flashdsa.kernels.indexer_training.sm90.head_sums.plan import (
    SCORES_HEADS,
    TARGET_HEADS,
    HeadSumsPlan,
    ScoresPlan,
    target_plan,
)
from flashdsa.plan.row_tiles import TILE_ROWS


@cache
def plan_for(num_heads: int, is_target: bool) -> HeadSumsPlan:
    """The plan with the fewest columns that so many heads fit in."""
    sizes = TARGET_HEADS if is_target else SCORES_HEADS
    columns = next(size for size in sizes if size >= num_heads)
    return target_plan(columns) if is_target else ScoresPlan(columns)


def head_sums(
    runner: Runner,
    q: Tensor,
    keys: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    of_heads: Tensor,
    attn_sink: Tensor | None = None,
    sm_scale: float | None = None,
) -> Tensor:
    """The sums (S, topk) fp32; with an `sm_scale` the target, else the scores.

    Args:
        q: (S, H, width), keys (S_kv, width) bf16. indices: (S, topk). topk_length: (S,) int32.
        of_heads: (S, H) fp32, lse or weights. attn_sink: (H,), of the target.
    """
    is_target = sm_scale is not None
    out = runner.empty(*indices.shape, dtype=torch.float32)
    if not keys.shape[0] or not out.numel():
        return out.fill_(0.0 if is_target else -torch.inf)
    plan = plan_for(q.shape[1], is_target)
    function = runner.function(ATTENTION_TARGET if is_target else INDEXER_SCORES, plan)
    every = runner.empty(0, dtype=torch.int32)
    no_sink = runner.empty(0, dtype=torch.float32)
    with runner.launching():
        function(
            readable(q),
            readable(keys),
            indices.contiguous(),
            every if topk_length is None else topk_length.contiguous(),
            of_heads.to(torch.float32).contiguous(),
            no_sink if attn_sink is None else attn_sink.to(torch.float32).contiguous(),
            out,
            sm_scale or 0.0,
            min(q.shape[0] * -(-indices.shape[1] // TILE_ROWS), runner.num_sms),
        )
    return out
