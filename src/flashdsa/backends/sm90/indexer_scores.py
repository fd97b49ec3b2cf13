"""The indexer's scores at given slots, for its training, on Hopper GPUs."""

from __future__ import annotations

from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.head_sums import head_sums
from flashdsa.operands import IndexerScoresOperands


def indexer_scores(runner: Runner, operands: IndexerScoresOperands) -> Tensor:
    """I (S, topk) fp32 = sum_h weights relu(q_index . k_index), -inf where a slot is invalid."""
    q, k, weights, indices, topk_length = operands
    return head_sums(runner, q, k, indices, topk_length, weights)
