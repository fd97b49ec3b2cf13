"""The divergence of the indexer's scores from the attention's target on Hopper GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import INDEXER_KL
from flashdsa.kernels.indexer_training.sm90.kl.plan import KlPlan
from flashdsa.operands import IndexerKlBwdOperands, IndexerKlOperands


def kl(runner: Runner, operands: IndexerKlOperands) -> Tensor:
    """KL (S,) fp32; 0 for rows without a valid slot or a target."""
    scores, target = operands
    out = runner.empty(scores.shape[0], dtype=torch.float32)
    if not scores.numel():
        return out.zero_()
    function = runner.function(INDEXER_KL, KlPlan())
    with runner.launching():
        function(scores.contiguous(), target.contiguous(), out)
    return out


def kl_backward(runner: Runner, operands: IndexerKlBwdOperands) -> Tensor:
    """d_scores (S, topk) fp32 = grad_kl (softmax of the scores - normalised target)."""
    scores, target, grad_kl = operands
    out = runner.empty(*scores.shape, dtype=torch.float32)
    if out.numel():
        function = runner.function(INDEXER_KL, KlPlan(gradient=True))
        with runner.launching():
            function(scores.contiguous(), target.contiguous(), grad_kl.contiguous(), out)
    return out
