"""Exact top-k of given scores on Hopper GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.backends.cpu.topk import check_lengths
from flashdsa.backends.indexer.clusters import clusters_for
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.backends.runner import Runner
from flashdsa.kernels.catalog import INDEXER, TOPK_INDICES
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.operands import TopkOperands


def topk_positions(runner: Runner, operands: TopkOperands, *, topk: int, sorted: bool) -> Tensor:
    """Positions (B, topk) int32 of the best `min(topk, length)` scores of each row, then -1.

    Lengths are clamped to [0, max_len]; with FLASHDSA_CHECK=1 others are errors, which waits for
    the device. Order and ties as on the CPU.
    """
    scores, lengths = operands
    rows = scores.shape[0]
    if values_are_checked():
        check_lengths(lengths.cpu(), scores.shape[1])
    positions = runner.empty(rows, topk, dtype=torch.int32)
    if scores.numel() == 0:
        return positions.fill_(-1)
    key = TOPK_INDICES.name, topk, sorted, rows
    launch = runner.launches.get(key)
    if launch is None:
        function = runner.function(TOPK_INDICES, TopkPlan(topk=topk, sorted=sorted))
        number, size, _ = clusters_for(runner, INDEXER.plans[0], rows).without_splits()
        launch = runner.launches[key] = (function, number, size)
    function, number, size = launch
    with runner.launching():
        function(scores, lengths.contiguous(), positions, number, size)
    return positions
