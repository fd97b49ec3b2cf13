"""The divergence of the indexer's scores from the attention's target on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.backends.memory import lie_densely
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import INDEXER_KL
from flashdsa.kernels.indexer_training.sm90.kl.plan import KlPlan

if TYPE_CHECKING:
    from flashdsa.ops.indexer_loss import IndexerKlBwdOperands, IndexerKlOperands

Serve = Callable[[Sequence[Tensor]], Tensor]
"""Function of the operands."""


def bind(runner: Runner, operands: IndexerKlOperands) -> Serve:
    """KL (S,) fp32; 0 for rows without a valid slot or a target."""
    return _bind(runner, KlPlan(), operands, operands.scores.shape[:1])


def bind_backward(runner: Runner, operands: IndexerKlBwdOperands) -> Serve:
    """d_scores (S, topk) fp32 = grad_kl (softmax of the scores - normalised target)."""
    return _bind(runner, KlPlan(gradient=True), operands, operands.scores.shape)


def _bind(
    runner: Runner,
    plan: KlPlan,
    operands: IndexerKlOperands | IndexerKlBwdOperands,
    shape: Sequence[int],
) -> Serve:
    """Bind the launch that writes a result of this shape."""
    if not operands.scores.numel():
        return lambda _: runner.empty(*shape, dtype=torch.float32).zero_()
    function = runner.function(INDEXER_KL, plan)
    empty = runner.allocator(*shape, dtype=torch.float32)
    dense = lie_densely(operands)

    def serve(operands: Sequence[Tensor]) -> Tensor:
        out = empty()
        function(*(operands if dense else [x.contiguous() for x in operands]), out)
        return out

    return runner.on_device(serve)
