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
from flashdsa.backends.memory import written_apart
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.prefill_pieces import Piece, explain, pieces_of
from flashdsa.backends.sm90.prefill_scores import bind_arguments, bind_ranked, bind_scores, plan_of
from flashdsa.kernels.catalog import PREFILL
from flashdsa.kernels.indexer.sm90.prefill.plan import PrefillPlan
from flashdsa.settings import Settings

if TYPE_CHECKING:
    from flashdsa.ops.prefill import PrefillOperands, TopkPrefillOperands


def bind(
    runner: Runner, operands: TopkPrefillOperands, *, sorted: bool
) -> Callable[[Sequence[Any]], None]:
    """Write each query's best key rows into `topk_indices` (S, topk) int32, in ascending row, or
    with `sorted` in descending score, by launches that score, rank and sort.

    Ranges are clamped to the keys; with FLASHDSA_CHECK=1 others are errors, which waits for the
    device.
    """
    kind = type(operands)
    if operands.topk_indices.shape[0] and operands.k_index.shape[0]:
        best = bind_ranked(runner, operands, sorted=True) if sorted else bind_best(runner, operands)
        serve = runner.on_device(written_apart(best, operands, "topk_indices"))
    else:
        serve = bind_none(operands)
    return with_ranges_checked(serve, lambda given: kind(*given).inputs)


def bind_none(operands: TopkPrefillOperands) -> Callable[[Sequence[Any]], None]:
    """Write -1 for calls without keys or without queries."""
    kind = type(operands)

    def serve(given: Sequence[Any]) -> None:
        kind(*given).topk_indices.fill_(-1)

    return serve


def bind_best(runner: Runner, operands: TopkPrefillOperands) -> Callable[..., object]:
    """Bind the launches of a call whose best come in ascending row, on operands that differ from
    these only in their values, inside `runner.launching()`. Neither queries nor keys are empty."""
    queries, topk = operands.topk_indices.shape
    keys, ragged = operands.k_index.shape[0], operands.starts is not None
    plan = plan_of(operands.inputs)
    sizes = shared(plan), queries, keys, topk, ragged
    pieces = pieces_of(runner, *sizes)
    runner.explain(partial(explain, runner, *sizes))
    return bind_plan(runner, plan, operands, pieces)


def bind_plan(
    runner: Runner, plan: PrefillPlan, operands: TopkPrefillOperands, pieces: Sequence[Piece] = ()
) -> Callable[..., Tensor]:
    """Bind the launches of a plan's kernel on operands that differ from these only in their values,
    inside `runner.launching()`; they return `topk_indices`. Neither queries nor keys are empty.

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

    def launch(operands: Sequence[Any]) -> Tensor:
        q_index, k_index, weights, ends, topk_indices, starts, k_scale = operands[:7]
        inputs = arguments(q_index, k_index, weights, ends, starts, k_scale)
        # Launches follow each other, so that they share the workspace.
        (workspace,) = runner.workspace(words, allocate)
        for own, function, numbers in launches:
            given = (*inputs, topk_indices)
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
        score, arguments = bind_scores(runner, operands), bind_arguments(runner, operands)

    def serve(operands: Sequence[Any]) -> Tensor:
        scores = empty_scores().fill_(-torch.inf)
        if queries and keys:
            score(arguments(*operands), scores)
        return scores

    return with_ranges_checked(runner.on_device(serve), lambda given: kind(*given))


@cache
def shared(plan: PrefillPlan) -> PrefillPlan:
    """The same plan for CTAs that share tiles."""
    return replace(plan, shared=True)


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
