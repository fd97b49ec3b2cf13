"""The divergence of the indexer's scores from the attention's target on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.backends.memory import lie_densely
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import INDEXER_KL
from flashdsa.kernels.indexer_training.sm90.kl.plan import KlPlan

if TYPE_CHECKING:
    from flashdsa.ops.indexer_loss import IndexerKlBwdOperands, IndexerKlOperands


def bind(runner: Runner, operands: IndexerKlOperands) -> Callable[[IndexerKlOperands], Tensor]:
    """KL (S,) fp32; 0 for rows without a valid slot or a target."""
    rows = operands.scores.shape[0]
    if not operands.scores.numel():
        return lambda _: runner.empty(rows, dtype=torch.float32).zero_()
    function = runner.function(INDEXER_KL, KlPlan())
    empty_kl = runner.allocator(rows, dtype=torch.float32)
    dense = lie_densely(operands)

    def serve(operands: IndexerKlOperands) -> Tensor:
        scores, target = operands
        if not dense:
            scores, target = scores.contiguous(), target.contiguous()
        out = empty_kl()
        function(scores, target, out)
        return out

    return runner.on_device(serve)


def bind_backward(
    runner: Runner, operands: IndexerKlBwdOperands
) -> Callable[[IndexerKlBwdOperands], Tensor]:
    """d_scores (S, topk) fp32 = grad_kl (softmax of the scores - normalised target)."""
    shape = tuple(operands.scores.shape)
    if not operands.scores.numel():
        return lambda _: runner.empty(*shape, dtype=torch.float32)
    function = runner.function(INDEXER_KL, KlPlan(gradient=True))
    empty_gradient = runner.allocator(*shape, dtype=torch.float32)
    dense = lie_densely(operands)

    def serve(operands: IndexerKlBwdOperands) -> Tensor:
        scores, target, grad_kl = operands
        if not dense:
            scores, target, grad_kl = (x.contiguous() for x in operands)
        out = empty_gradient()
        function(scores, target, grad_kl, out)
        return out

    return runner.on_device(serve)
