"""The indexer over shared keys on Hopper GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flashdsa.backends.cpu.prefill import ranges_of
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.errors import UnsupportedError
from flashdsa.kernels.catalog import PREFILL, PREFILL_LOGITS, PREFILL_ORDER
from flashdsa.kernels.indexer.plan import TOPK
from flashdsa.kernels.indexer.sm90.order.plan import OrderPlan
from flashdsa.kernels.indexer.sm90.prefill.plan import PrefillPlan
from flashdsa.operands import PrefillOperands, TopkPrefillOperands


def topk_prefill(runner: Runner, operands: TopkPrefillOperands, *, sorted: bool) -> None:
    """Write each query's best key rows into `topk_indices` (S, topk) int32, in ascending row, or
    with `sorted` in descending score, by a second launch that sorts the lists.

    Ranges are clamped to the keys; with FLASHDSA_CHECK=1 others are errors, which waits for the
    device.
    """
    topk_indices, inputs = operands.topk_indices, operands.inputs
    if not topk_indices.is_contiguous():
        raise UnsupportedError(
            "topk_indices: the kernel writes contiguous tensors only; got shape "
            f"{list(topk_indices.shape)} with strides {list(topk_indices.stride())}"
        )
    _check_if_asked(inputs)
    if not inputs.q_index.shape[0] or not inputs.k_index.shape[0]:
        topk_indices.fill_(-1)
        return
    plan = plan_of(inputs)
    if not sorted:
        launch(runner, plan, operands)
        return
    scores = runner.empty(*topk_indices.shape, dtype=torch.int32)
    launch(runner, replace(plan, with_scores=True), operands, scores)
    width = next(width for width in TOPK if width >= topk_indices.shape[1])
    order = runner.function(PREFILL_ORDER, OrderPlan(width))
    with runner.launching():
        order(topk_indices, scores)


def launch(
    runner: Runner,
    plan: PrefillPlan,
    operands: TopkPrefillOperands,
    topk_scores: Tensor | None = None,
) -> None:
    """Launch a plan's kernel; there are queries and keys.

    Args:
        topk_scores: (S, topk) int32, bits of the best's fp32 scores; of a plan that writes them.
    """
    outputs = [operands.topk_indices] + ([] if topk_scores is None else [topk_scores])
    allocate = partial(_allocate, words=plan.workspace_words)
    (workspace,) = runner.workspace(plan.workspace_words, allocate)
    function = runner.function(PREFILL, plan)
    with runner.launching():
        function(*_arguments(operands.inputs), *outputs, workspace, runner.num_sms)


def logits(runner: Runner, operands: PrefillOperands) -> Tensor:
    """Scores (S, S_kv) fp32, -inf outside each query's range. Bit-equal to what is ranked."""
    rows, keys = operands.q_index.shape[0], operands.k_index.shape[0]
    scores = runner.empty(rows, keys, dtype=torch.float32).fill_(-torch.inf)
    _check_if_asked(operands)
    if scores.numel():
        function = runner.function(PREFILL_LOGITS, plan_of(operands, scores_only=True))
        with runner.launching():
            function(*_arguments(operands), scores, runner.num_sms)
    return scores


def plan_of(operands: PrefillOperands, *, scores_only: bool = False) -> PrefillPlan:
    """Of the kernel that serves a call."""
    dtype = str(operands.q_index.dtype).removeprefix("torch.")
    return PrefillPlan(operands.q_index.shape[1], dtype, scores_only)


def _arguments(operands: PrefillOperands) -> tuple[Tensor, ...]:
    """In the kernel's order, copied where it cannot read them as they are."""
    q_index, k_index, weights, ends, starts, k_scale = operands
    weights = readable(weights)
    return (
        readable(q_index),
        readable(k_index),
        weights.view(-1) if k_scale is None else readable(k_scale),
        weights,
        ends.new_empty(0) if starts is None else starts.contiguous(),
        ends.contiguous(),
    )


def _allocate(runner: Runner, words: int) -> tuple[Tensor, ...]:
    return (runner.empty(runner.num_sms, words, dtype=torch.int32),)


def _check_if_asked(operands: PrefillOperands) -> None:
    """With FLASHDSA_CHECK=1, raise ArgumentValueError for a range that is none of the keys."""
    if values_are_checked():
        starts = None if operands.starts is None else operands.starts.cpu()
        ranges_of(operands._replace(ends=operands.ends.cpu(), starts=starts))
