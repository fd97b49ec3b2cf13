"""The indexer's scores at given slots, for its training, on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.backends.memory import aligned, lie_densely
from flashdsa.backends.runner import Runner
from flashdsa.heuristics.h200 import IndexScores
from flashdsa.kernels.catalog import INDEXER_SCORES
from flashdsa.kernels.indexer_training.sm90.scores.plan import NUM_HEADS, TILE_KEYS, ScoresPlan

if TYPE_CHECKING:
    from flashdsa.ops.indexer_training import IndexerScoresOperands


@cache
def plan_for(num_heads: int) -> ScoresPlan:
    """The plan with the fewest columns for `num_heads` heads."""
    return ScoresPlan(next(size for size in NUM_HEADS if size >= num_heads))


@cache
def parts_for(num_queries: int, tiles: int, ctas: int, num_sms: int) -> int:
    """CTAs that share a query: as many as run at once, unless others leave fewer SMs idle at the
    end. `tiles`: of a query. `ctas`: that an SM runs at once."""
    at_once = ctas * num_sms
    usual = max(1, min(at_once // num_queries, tiles))

    def duration(parts: int) -> float:
        left = num_queries * parts % at_once
        last = max(IndexScores.ALONE, -(-left // num_sms)) if left else 0
        each = -(-tiles // parts) + IndexScores.OVERHEAD
        return each * (num_queries * parts // at_once * ctas + last)

    best = min(range(1, min(IndexScores.MOST_PARTS, tiles) + 1), key=duration)
    return best if duration(best) < IndexScores.GAIN * duration(usual) else usual


def bind(
    runner: Runner, operands: IndexerScoresOperands
) -> Callable[[IndexerScoresOperands], Tensor]:
    """I (S, topk) fp32 = sum_h weights relu(q_index . k_index), -inf where a slot is invalid."""
    num_queries, topk = operands.indices.shape
    if not operands.k_index.shape[0] or not operands.indices.numel():
        return lambda _: runner.empty(num_queries, topk, dtype=torch.float32).fill_(-torch.inf)
    plan = plan_for(operands.q_index.shape[1])
    function = runner.function(INDEXER_SCORES, plan)
    parts = parts_for(num_queries, -(-topk // TILE_KEYS), plan.ctas, runner.num_sms)
    every = runner.empty(0, dtype=torch.int32)
    empty_scores = runner.allocator(num_queries, topk, dtype=torch.float32)
    dense = lie_densely(operands) and operands.weights.dtype is torch.float32

    def serve(operands: IndexerScoresOperands) -> Tensor:
        q, k, weights, indices, topk_length = operands
        lengths = every if topk_length is None else topk_length
        if not dense:
            q, k = q.contiguous(), k.contiguous()
            weights = weights.to(torch.float32).contiguous()
            indices, lengths = indices.contiguous(), lengths.contiguous()
        out = empty_scores()
        function(aligned(q), aligned(k), indices, lengths, weights, out, parts)
        return out

    return runner.on_device(serve)
