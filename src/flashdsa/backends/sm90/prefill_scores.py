"""Scores of queries over shared keys on Hopper GPUs, and their ranking by a second launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.tiling import spans
from flashdsa.backends.memory import aligned, lie_densely
from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.ranking import bind_choice, rows_at_once
from flashdsa.heuristics.h200 import Prefill
from flashdsa.kernels.catalog import PREFILL_LOGITS
from flashdsa.kernels.indexer.sm90.plan import BLOCK
from flashdsa.kernels.indexer.sm90.prefill.plan import TILE_KEYS, PrefillPlan
from flashdsa.problem import INT32_MAX

if TYPE_CHECKING:
    from flashdsa.ops.prefill import PrefillOperands, TopkPrefillOperands


def bind_ranked(
    runner: Runner, operands: TopkPrefillOperands, *, sorted: bool, block: int = 1
) -> Callable[[Sequence[Any]], None]:
    """Bind the choice of rows, of blocks or of candidates' rows into `topk_indices`, which has no
    gaps, by scores of some queries at a time and their ranking. It is called inside
    `runner.launching()`; neither queries, keys nor the columns of candidates are empty."""
    kind = type(operands)
    queries, keys = operands.q_index.shape[0], operands.k_index.shape[0]
    of_blocks = block > 1 and operands.candidates is None
    # Blocks that begin at row 0 are scored whole.
    each = BLOCK if of_blocks and block % BLOCK == 0 and operands.starts is None else 1
    width = -(-keys // each)
    score_all = sorted or operands.candidates is not None
    unscored = 0 if score_all else operands.topk_indices.shape[1] * block
    score = bind_scores(runner, operands.inputs, unscored, of_blocks=each > 1)
    arguments = bind_arguments(runner, operands.inputs)
    rank = bind_choice(runner, operands, block, each, sorted=sorted, positions=True, paged=False)
    no_pages = runner.empty(0, 0, dtype=torch.int32)

    def serve(given: Sequence[Any]) -> None:
        x = kind(*given)
        q, k, k_scale, weights, starts, ends = arguments(*x.inputs)
        for first, end in spans(queries, rows_at_once(width)):
            own = slice(first, end)
            begins, own_ends = starts[own], ends[own]
            scores = runner.empty(end - first, width, dtype=torch.float32)
            if keys > unscored:
                score((q[own], k, k_scale, weights[own], begins, own_ends), scores)
            rank(scores, begins, own_ends, no_pages, 0, own, x)

    return serve


def bind_scores(
    runner: Runner, operands: PrefillOperands, unscored: int = 0, *, of_blocks: bool = False
) -> Callable[[Sequence[Any], Tensor], None]:
    """Bind the launch that writes the scores, where a query sees a key: a function of what
    `bind_arguments` gives, for any number of queries, and scores (S, S_kv) fp32, or (S, blocks).

    Args:
        unscored: scores of queries that see at most this many keys may be missing.
    """
    plan = plan_of(operands, scores_only=True, of_blocks=of_blocks)
    function = runner.function(PREFILL_LOGITS, plan)
    key_tiles = -(-operands.k_index.shape[0] // TILE_KEYS)

    def launch(inputs: Sequence[Any], scores: Tensor) -> None:
        tiles = -(-len(scores) // plan.tile_queries)
        parts = parts_of(tiles, key_tiles, runner.num_sms)
        function(*inputs, scores, runner.num_sms, parts, min(unscored, INT32_MAX))

    return launch


@lru_cache(maxsize=256)
def parts_of(tiles: int, key_tiles: int, num_sms: int) -> int:
    """CTAs among which the keys of each tile are divided, so that all are done soonest."""

    def time(parts: int) -> float:
        return -(-tiles * parts // num_sms) * (key_tiles / parts + Prefill.SCORING)

    most = min(num_sms, key_tiles, INT32_MAX // key_tiles - 1)
    return min(range(1, most + 1), key=time)


def plan_of(operands: PrefillOperands, **choices: bool) -> PrefillPlan:
    """Plan of the kernel that serves a call. choices: fields of the plan, those that are set."""
    dtype = str(operands.q_index.dtype).removeprefix("torch.")
    return _plan(operands.q_index.shape[1], dtype, **choices)


@cache
def _plan(num_heads: int, dtype: str, **choices: bool) -> PrefillPlan:
    """A plan checks its barriers, which takes longer than a launch."""
    return PrefillPlan(num_heads, dtype, **choices)


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
