"""Exact top-k of given scores on Hopper GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.topk import check_lengths
from flashdsa.backends.indexer.clusters import clusters_for
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.positions import ascending
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import INDEXER, TOPK_INDICES
from flashdsa.kernels.indexer.plan import TOPK
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
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
    rank = bind_ranking(runner, 0 if is_empty else rows, topk, sorted=sorted)

    def serve(operands: Sequence[Any]) -> Tensor:
        scores, lengths = operands
        if check and values_are_checked():
            check_lengths(lengths.cpu(), max_len)
        if is_empty:
            return runner.empty(rows, topk, dtype=torch.int32).fill_(-1)
        return rank(scores, lengths.contiguous())

    return runner.on_device(serve)


def bind_ranking(
    runner: Runner, rows: int, topk: int, *, sorted: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """Bind the launch of so many rows, none if 0: a function of scores (rows, max_len) and lengths,
    called inside `runner.launching()`, that gives positions as `bind`'s does."""
    width = next(width for width in TOPK if width >= topk)
    empty_positions = runner.allocator(rows, width, dtype=torch.int32)
    if rows:
        plan = TopkPlan(topk=width, sorted=sorted or width > topk)
        number, size, _ = clusters_for(runner, INDEXER.plans[0], rows).without_splits()
        function = runner.function(TOPK_INDICES, plan)

    def rank(scores: Tensor, lengths: Tensor) -> Tensor:
        positions = empty_positions()
        function(scores, lengths, positions, number, size)
        if width == topk:
            return positions
        best = positions[:, :topk]
        return best.contiguous() if sorted else ascending(best)

    return rank
