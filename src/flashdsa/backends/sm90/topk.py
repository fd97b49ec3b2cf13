"""Exact top-k of given scores on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.topk import check_lengths
from flashdsa.backends.indexer.choice import clusters_for, gpu_of
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.positions import ascending
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import INDEXER, TOPK_INDICES
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.settings import Settings

if TYPE_CHECKING:
    from flashdsa.ops.indexer import TopkOperands


def bind(
    runner: Runner, operands: TopkOperands, *, topk: int, sorted: bool
) -> Callable[[Sequence[Any]], Tensor]:
    """Positions (B, topk) int32 of the best `min(topk, length)` scores of each row, then -1.

    A `topk` between the kernels' widths gets the next one's list, cut: sorted by score first, so
    that the best remain, then put in ascending order if that is asked for.

    Lengths are clamped to [0, max_len]; with FLASHDSA_CHECK=1 others are errors, which waits for
    the device. Order and ties as on the CPU.
    """
    rows, max_len = operands.scores.shape
    check, is_empty = Settings.from_environment().check, not operands.scores.numel()
    plan = TopkPlan(sorted=sorted)
    rank = bind_ranking(runner, TOPK_INDICES, plan, 0 if is_empty else rows, topk)

    def serve(operands: Sequence[Any]) -> Tensor:
        scores, lengths = operands
        if check and values_are_checked():
            check_lengths(lengths.cpu(), max_len)
        if is_empty:
            return runner.empty(rows, topk, dtype=torch.int32).fill_(-1)
        return rank(scores, lengths.contiguous())

    return runner.on_device(serve)


def bind_ranking(
    runner: Runner, spec: KernelSpec, plan: TopkPlan, rows: int, topk: int
) -> Callable[..., Tensor]:
    """Bind the launch of so many rows, none if 0: a function of what `spec`'s kernel takes before
    the ids, called inside `runner.launching()`, that gives ids (rows, topk) as `bind`'s does.

    It writes them to `out`, without gaps, if that is given and a kernel is as wide as `topk`.

    Args:
        plan: any width's; its ids are positions, if no kernel has `topk`'s.
    """
    width = width_for(spec, plan, topk)
    empty_ids = runner.allocator(rows, width, dtype=torch.int32)
    if rows:
        number, size = clusters_for(gpu_of(runner, INDEXER.plans[0]), rows)
        cut = width > topk
        function = runner.function(spec, replace(plan, topk=width, sorted=plan.sorted or cut))

    def rank(*given: Any, out: Tensor | None = None) -> Tensor:
        ids = out if out is not None and width == topk else empty_ids()
        function(*given, ids, number, size)
        if width == topk:
            return ids
        best = ids[:, :topk]
        return best.contiguous() if plan.sorted else ascending(best)

    return rank


def width_for(spec: KernelSpec, plan: TopkPlan, topk: int) -> int:
    """The least width that holds `topk` ids, of the spec's kernels of the plan's kind."""
    kinds = [replace(plan, topk=one.topk) for one in spec.plans if one.topk >= topk]
    return min(kind.topk for kind in kinds if kind in spec.plans)
