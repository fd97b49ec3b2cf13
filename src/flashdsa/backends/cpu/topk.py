"""Exact top-k of fp32 scores: one unique integer key a position, so that no tie is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.errors import ArgumentValueError
from flashdsa.problem import INT32_MAX

if TYPE_CHECKING:
    from flashdsa.ops.indexer import TopkOperands

_NAN_KEY = -(2**31)
"""Key of NaN, below that of -inf: NaN ranks last."""
_POSITION_MASK = 2**32 - 1
NEVER = torch.iinfo(torch.int64).min
"""Key of positions that must not be selected; below every key of a score."""


def topk_positions(operands: TopkOperands, *, topk: int, sorted: bool) -> Tensor:
    """Positions (B, topk) int32 of the best `min(topk, length)` scores of each row, then -1.

    Args:
        operands: scores at or beyond a row's length are ignored; lengths are in [0, max_len].
        topk: width of the result.
        sorted: descending score (ties by position); otherwise ascending position.

    Raises:
        ArgumentValueError: a length is negative or exceeds max_len.
    """
    scores, lengths = operands
    check_lengths(lengths, scores.shape[1])
    out = torch.full((scores.shape[0], topk), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        chosen = select(scores[row, :length], None, topk, sorted=sorted)
        out[row, : len(chosen)] = chosen.to(torch.int32)
    return out


def check_lengths(lengths: Tensor, max_len: int) -> None:
    """Raise ArgumentValueError for a length outside [0, max_len]."""
    bad = (lengths < 0) | (lengths > max_len)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise ArgumentValueError(
            f"lengths: expected values in [0, {max_len}] (the width of scores); "
            f"got lengths[{row}] = {int(lengths[row])}"
        )


def select(scores: Tensor, selectable: Tensor | None, topk: int, *, sorted: bool) -> Tensor:
    """Positions (int64) of the best `topk` of `scores` (n,), fewer where fewer are `selectable`."""
    count = len(scores) if selectable is None else int(selectable.sum())
    keys = ranking_keys(scores)
    if selectable is not None:
        keys = keys.masked_fill(~selectable, NEVER)
    chosen = keys.topk(min(topk, count), sorted=sorted).indices
    return chosen if sorted else chosen.sort().values


def ranking_keys(scores: Tensor) -> Tensor:
    """Unique int64 keys (..., n) of a row's scores: greater means better.

    High half: the score's bits as a monotone signed integer (-0 folded into +0, NaN lowest).
    Low half: the complement of the position, so that of equal scores the smallest position wins.
    """
    bits = (scores + 0.0).view(torch.int32)
    monotone = torch.where(bits < 0, bits ^ INT32_MAX, bits)
    monotone = monotone.masked_fill(scores.isnan(), _NAN_KEY).long()
    positions = torch.arange(scores.shape[-1], device=scores.device)
    return (monotone << 32) | (_POSITION_MASK - positions)
