"""Exact top-k of fp32 scores: one unique integer key a position, so that no tie is left."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashdsa.backends.cpu.tiling import CPU, Mode, spans
from flashdsa.backends.indexer.tensors import values_are_checked
from flashdsa.errors import ArgumentValueError
from flashdsa.problem import INT32_MAX

if TYPE_CHECKING:
    from flashdsa.ops.indexer import TopkOperands

_NAN_KEY = -(2**31)
"""Key of NaN, below that of -inf: NaN ranks last."""
_POSITION_MASK = 2**32 - 1
NEVER = torch.iinfo(torch.int64).min
"""Key of positions that must not be selected; below every key of a score."""
BYTES_OF_SCORE = 32
"""Temporaries of a score: int64 keys, their sorted copy, masks."""


def rows_at_once(width: int, mode: Mode, others: int = 0) -> int:
    """Rows of `width` scores that are ranked together, `others` bytes more for each score."""
    return max(1, mode.workspace // (max(width, 1) * (BYTES_OF_SCORE + others)))


def topk_positions(operands: TopkOperands, *, topk: int, sorted: bool, mode: Mode = CPU) -> Tensor:
    """Positions (B, topk) int32 of the best `min(topk, length)` scores of each row, then -1.

    Args:
        operands: scores at or beyond a row's length are ignored; lengths are in [0, max_len], which
            a mode that does not read values clamps them to.
        topk: width of the result.
        sorted: descending score (ties by position); otherwise ascending position.

    Raises:
        ArgumentValueError: a length is negative or exceeds max_len.
    """
    scores, lengths = operands
    if mode.reads or values_are_checked():
        check_lengths(lengths, scores.shape[1])
    rows, width = scores.shape
    out = lengths.new_empty(rows, topk)
    position = torch.arange(width, device=scores.device)
    for first, last in spans(rows, rows_at_once(width, mode)):
        selectable = position < lengths[first:last, None]
        out[first:last] = select(scores[first:last], selectable, topk, sorted=sorted)
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


def select(scores: Tensor, selectable: Tensor, topk: int, *, sorted: bool) -> Tensor:
    """Positions (B, topk) int32 of the best of `scores` (B, n) among `selectable` ones, then -1."""
    width = scores.shape[1]
    keys = ranking_keys(scores).masked_fill(~selectable, NEVER)
    best = keys.topk(min(topk, width), dim=1, sorted=True)
    chosen = best.indices.masked_fill(best.values == NEVER, width)
    if not sorted:
        chosen = chosen.sort(dim=1).values
    chosen = chosen.masked_fill(chosen == width, -1).to(torch.int32)
    return pad(chosen, (0, topk - chosen.shape[1]), value=-1)


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


def block_scores(scores: Tensor, selectable: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Scores (B, ceil(n / block)) of blocks, and which have a position to choose: the best score of
    each, NaN where none is a number."""
    count = -(-scores.shape[1] // block)
    padding = (0, count * block - scores.shape[1])
    some = pad(selectable, padding).unflatten(1, (count, block)).any(2)
    scored = pad(scores.masked_fill(~selectable, math.nan), padding, value=math.nan)
    scored = scored.unflatten(1, (count, block))
    missing = scored.isnan()
    best = scored.masked_fill(missing, -math.inf).amax(2).masked_fill(missing.all(2), math.nan)
    return best, some


def among(candidates: Tensor, width: int, block: int) -> Tensor:
    """Which of `width` positions are in one of a row's listed blocks (B, width); bool. Ids of no
    visible block, and repeated ones, add nothing."""
    count, ids = -(-width // block), candidates.long()
    found = torch.zeros(len(ids), count + 1, dtype=torch.bool, device=ids.device)
    inside = (ids >= 0) & (ids < count)
    found.scatter_(1, ids.masked_fill(~inside, count), True)
    return found[:, :count].repeat_interleave(block, dim=1)[:, :width]


def choose(
    scores: Tensor,
    selectable: Tensor,
    lengths: Tensor,
    topk: int,
    *,
    block: int,
    candidates: Tensor | None,
    sorted: bool,
) -> Tensor:
    """Positions (B, topk) int32 of the best of some rows' first `lengths` (B, 1) `scores` (B, n),
    then -1; without `candidates` of blocks of `block` positions, of which the newest always counts
    as best, else of positions in one of these blocks (B, some)."""
    if candidates is not None:
        selectable = selectable & among(candidates, scores.shape[1], block)
    elif block > 1:
        newest = (lengths.clamp(max=scores.shape[1]) - 1) // block
        scores, selectable = block_scores(scores, selectable, block)
        number = torch.arange(scores.shape[1], device=scores.device)
        scores = scores.masked_fill((number == newest) & selectable, math.inf)
    return select(scores, selectable, topk, sorted=sorted)
