"""Exact top-k of given scores on Hopper GPUs."""

from __future__ import annotations

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
from flashdsa.operands import TopkOperands


def topk_positions(runner: Runner, operands: TopkOperands, *, topk: int, sorted: bool) -> Tensor:
    """Positions (B, topk) int32 of the best `min(topk, length)` scores of each row, then -1.

    A `topk` between the kernels' widths gets the next one's list, cut: sorted by score first, so
    that the best remain, then put in ascending order if that is asked for.

    Lengths are clamped to [0, max_len]; with FLASHDSA_CHECK=1 others are errors, which waits for
    the device. Order and ties as on the CPU.
    """
    scores, lengths = operands
    rows = scores.shape[0]
    if values_are_checked():
        check_lengths(lengths.cpu(), scores.shape[1])
    if scores.numel() == 0:
        return runner.empty(rows, topk, dtype=torch.int32).fill_(-1)
    key = TOPK_INDICES.name, topk, sorted, rows
    launch = runner.launches.get(key)
    if launch is None:
        width = next(width for width in TOPK if width >= topk)
        plan = TopkPlan(topk=width, sorted=sorted or width > topk)
        number, size, _ = clusters_for(runner, INDEXER.plans[0], rows).without_splits()
        launch = runner.launches[key] = (runner.function(TOPK_INDICES, plan), width, number, size)
    function, width, number, size = launch
    positions = runner.empty(rows, width, dtype=torch.int32)
    with runner.launching():
        function(scores, lengths.contiguous(), positions, number, size)
    if width == topk:
        return positions
    best = positions[:, :topk]
    return best.contiguous() if sorted else ascending(best)
