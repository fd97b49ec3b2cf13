"""Exact top-k of given scores on Hopper GPUs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.topk import check_lengths
from flashdsa.backends.sm90.clusters import clusters_for, without_teams
from flashdsa.backends.sm90.device import values_are_checked
from flashdsa.jit.loader import load
from flashdsa.kernels.catalog import TOPK_INDICES
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.operands import TopkOperands


def topk_positions(operands: TopkOperands, *, topk: int, sorted: bool) -> Tensor:
    """Positions (B, topk) int32 of the best `min(topk, length)` scores of each row, then -1.

    Lengths are clamped to [0, max_len]; with FLASHDSA_CHECK=1 others are errors, which waits for
    the device. Order and ties as on the CPU.
    """
    scores, lengths = operands
    check_if_asked(lengths, scores.shape[1])
    positions = torch.empty(scores.shape[0], topk, dtype=torch.int32, device=scores.device)
    if scores.numel() == 0:
        return positions.fill_(-1)
    function = _function(topk, sorted)
    with torch.cuda.device(scores.device):
        clusters = without_teams(clusters_for(torch.cuda.current_device(), scores.shape[0]))
        function(scores, lengths.contiguous(), positions, clusters.number, clusters.size)
    return positions


def check_if_asked(lengths: Tensor, max_len: int) -> None:
    """With FLASHDSA_CHECK=1, raise ArgumentValueError for a length outside [0, max_len]."""
    if values_are_checked():
        check_lengths(lengths.cpu(), max_len)


@lru_cache
def _function(topk: int, sorted: bool) -> Any:
    return load(TOPK_INDICES, TopkPlan(topk=topk, sorted=sorted))
