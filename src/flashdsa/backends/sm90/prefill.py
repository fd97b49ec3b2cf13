"""The indexer over shared keys on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.prefill import ranges_of
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.memory import aligned, lie_densely, written_apart
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.prefill_pieces import Piece, pieces_of
from flashdsa.kernels.catalog import PREFILL, PREFILL_LOGITS, PREFILL_ORDER
from flashdsa.kernels.indexer.plan import TOPK
from flashdsa.kernels.indexer.sm90.order.plan import OrderPlan
from flashdsa.kernels.indexer.sm90.prefill.plan import PrefillPlan
from flashdsa.settings import Settings

if TYPE_CHECKING:
    from flashdsa.ops.prefill import PrefillOperands, TopkPrefillOperands


def bind(
    runner: Runner, operands: TopkPrefillOperands, *, sorted: bool
) -> Callable[[Sequence[Any]], None]:
    """Write each query's best key rows into `topk_indices` (S, topk) int32, in ascending row, or
    with `sorted` in descending score, by a second launch that sorts the lists.

    Ranges are clamped to the keys; with FLASHDSA_CHECK=1 others are errors, which waits for the
    device.
    """
    kind = type(operands)
    if operands.topk_indices.shape[0] and operands.k_index.shape[0]:
        plan = plan_of(operands.inputs, with_scores=sorted)
        serve = runner.on_device(
            written_apart(bind_best(runner, plan, operands), operands, "topk_indices")
        )
    else:
        serve = bind_none(operands)
    return with_ranges_checked(serve, lambda given: kind(*given).inputs)


def bind_none(operands: TopkPrefillOperands) -> Callable[[Sequence[Any]], None]:
    """Write -1 for calls without keys or without queries."""
    kind = type(operands)

    def serve(given: Sequence[Any]) -> None:
        kind(*given).topk_indices.fill_(-1)

    return serve


def bind_best(
    runner: Runner, plan: PrefillPlan, operands: TopkPrefillOperands
) -> Callable[..., object]:
    """Bind the launches of a plan on operands that differ from these only in their values, inside
    `runner.launching()`, and of a plan with scores the sort. With `among` they take `Listed`'s
    tensors, too. Neither queries nor keys are empty, and `topk_indices` has no gaps.
    """
    queries, topk = operands.topk_indices.shape
    keys, ragged = operands.k_index.shape[0], operands.starts is not None
    pieces = pieces_of(runner, shared(plan), queries, keys, topk, ragged)
    launch = bind_plan(runner, plan, operands, pieces)
    if not plan.with_scores:
        return launch
    width = next(width for width in TOPK if width >= topk)
    order = runner.function(PREFILL_ORDER, OrderPlan(width))
    empty_scores = runner.allocator(queries, topk, dtype=torch.int32)

    def serve(operands: Sequence[Any], *listed: Tensor) -> None:
        scores = empty_scores()
        order(launch(operands, *listed, scores), scores)

    return serve


def bind_plan(
    runner: Runner, plan: PrefillPlan, operands: TopkPrefillOperands, pieces: Sequence[Piece] = ()
) -> Callable[..., Tensor]:
    """Bind the launches of a plan's kernel on operands that differ from these only in their values,
    inside `runner.launching()`; they return `topk_indices`. Neither queries nor keys are empty.

    A plan with `among` takes `Listed`'s tensors (prefill/tiles.py) too, and at last one with scores
    their buffer: (S, topk) int32 for the bits of fp32.

    Args:
        plan: of launches whose CTAs share no tiles. pieces: the launches; none: one of that kind.
    """
    queries = operands.q_index.shape[0]
    pieces = pieces or (Piece(0, queries, runner.num_sms, 1),)
    words = plan.workspace_words
    allocate = partial(_allocate, words=words)
    arguments = bind_arguments(runner, operands.inputs)
    launches = []
    for piece in pieces:
        own = plan if piece.cluster_size == 1 else shared(plan)
        numbers = (piece.num_ctas, *([piece.cluster_size] if own.shared else []))
        launches.append((slice(*piece[:2]), runner.function(PREFILL, own), numbers))

    def launch(operands: Sequence[Any], *further: Tensor) -> Tensor:
        q_index, k_index, weights, ends, topk_indices, starts, k_scale = operands[:7]
        inputs = arguments(q_index, k_index, weights, ends, starts, k_scale)
        listed, topk_scores = further[: 2 * plan.among], further[2 * plan.among :]
        # Launches follow each other, so that they share the workspace.
        (workspace,) = runner.workspace(words, allocate)
        for own, function, numbers in launches:
            given = (*inputs, *listed, topk_indices, *topk_scores)
            if len(launches) > 1:
                q, k, k_scale, w, *rows = given
                given = (q[own], k, k_scale, w[own], *(x[own] for x in rows))
            function(*given, workspace, *numbers)
        return topk_indices  # type: ignore[no-any-return]

    return launch


def bind_logits(runner: Runner, operands: PrefillOperands) -> Callable[[Sequence[Any]], Tensor]:
    """Scores (S, S_kv) fp32, -inf outside each query's range. Bit-equal to what is ranked."""
    queries, keys = operands.q_index.shape[0], operands.k_index.shape[0]
    empty_scores = runner.allocator(queries, keys, dtype=torch.float32)
    kind = type(operands)
    if queries and keys:
        function = runner.function(PREFILL_LOGITS, plan_of(operands, scores_only=True))
        arguments, num_sms = bind_arguments(runner, operands), runner.num_sms

    def serve(operands: Sequence[Any]) -> Tensor:
        scores = empty_scores().fill_(-torch.inf)
        if queries and keys:
            function(*arguments(*operands), scores, num_sms)
        return scores

    return with_ranges_checked(runner.on_device(serve), lambda given: kind(*given))


def plan_of(operands: PrefillOperands, **choices: bool) -> PrefillPlan:
    """Plan of the kernel that serves a call. choices: fields of the plan, those that are set."""
    dtype = str(operands.q_index.dtype).removeprefix("torch.")
    return _plan(operands.q_index.shape[1], dtype, **choices)


@cache
def _plan(num_heads: int, dtype: str, **choices: bool) -> PrefillPlan:
    """A plan checks its barriers, which takes longer than a launch."""
    return PrefillPlan(num_heads, dtype, **choices)


@cache
def shared(plan: PrefillPlan) -> PrefillPlan:
    """The same plan for CTAs that share tiles."""
    return replace(plan, shared=True)


def bind_arguments(runner: Runner, operands: PrefillOperands) -> Callable[..., tuple[Tensor, ...]]:
    """Bind a function that gives the inputs in the kernel's order, copied if it cannot read them as
    they are."""
    from_row_0 = runner.empty(0, dtype=torch.int32)
    no_scales = runner.empty(0, dtype=torch.float32)
    dense = lie_densely(operands)

    def arguments(
        q_index: Tensor,
        k_index: Tensor,
        weights: Tensor,
        ends: Tensor,
        starts: Tensor | None,
        k_scale: Tensor | None,
    ) -> tuple[Tensor, ...]:
        if starts is None:
            starts = from_row_0
        if k_scale is None:
            k_scale = no_scales
        if not dense:
            q_index, k_index, weights = (x.contiguous() for x in (q_index, k_index, weights))
            ends, starts, k_scale = (x.contiguous() for x in (ends, starts, k_scale))
        q_index, k_index, weights = aligned(q_index), aligned(k_index), aligned(weights)
        return q_index, k_index, aligned(k_scale), weights, starts, ends

    return arguments


def _allocate(runner: Runner, words: int) -> tuple[Tensor, ...]:
    return (runner.empty(runner.num_sms, words, dtype=torch.int32),)


def with_ranges_checked(
    serve: Callable[[Sequence[Any]], Any], inputs_of: Callable[[Sequence[Any]], PrefillOperands]
) -> Callable[[Sequence[Any]], Any]:
    """`serve`, after a check that raises ArgumentValueError for a range outside the keys if
    FLASHDSA_CHECK=1."""
    if not Settings.from_environment().check:
        return serve

    def checked(operands: Sequence[Any]) -> Any:
        if values_are_checked():  # not while a graph is captured
            inputs = inputs_of(operands)
            starts = None if inputs.starts is None else inputs.starts.cpu()
            ranges_of(inputs._replace(ends=inputs.ends.cpu(), starts=starts))
        return serve(operands)

    return checked
