"""Exact top-k of rows of scores by torch on any device, all rows at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashdsa.backends.cpu.tiling import DEVICE_WORKSPACE_BYTES, spans
from flashdsa.backends.cpu.topk import NEVER, check_lengths, ranking_keys
from flashdsa.backends.indexer.tensors import values_are_checked

if TYPE_CHECKING:
    from flashdsa.ops.indexer import TopkOperands

BYTES_OF_SCORE = 32
"""Temporaries of a score: int64 keys, their sorted copy, masks."""


def rows_at_once(width: int, others: int = 0) -> int:
    """Rows of `width` scores that are ranked together, `others` bytes more for each score."""
    return max(1, DEVICE_WORKSPACE_BYTES // (max(width, 1) * (BYTES_OF_SCORE + others)))


def topk_positions(operands: TopkOperands, *, topk: int, sorted: bool) -> Tensor:
    """Positions (B, topk) int32 of the best `min(topk, length)` scores of each row, then -1.

    Lengths are clamped to [0, max_len]. `sorted`: descending score (ties by position); otherwise
    ascending position.
    """
    scores, lengths = operands
    if values_are_checked():
        check_lengths(lengths, scores.shape[1])
    rows, width = scores.shape
    out = lengths.new_empty(rows, topk)
    position = torch.arange(width, device=scores.device)
    for first, last in spans(rows, rows_at_once(width)):
        selectable = position < lengths[first:last, None]
        out[first:last] = select(scores[first:last], selectable, topk, sorted=sorted)
    return out


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


def block_scores(scores: Tensor, selectable: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Scores (B, ceil(n / block)) of blocks, and which have a position to choose: the best score of
    each, NaN where none is a number, and infinity of the last one, which has the newest position.
    """
    padding = (0, -scores.shape[1] % block)
    some = pad(selectable, padding).unflatten(1, (-1, block)).any(2)
    scored = pad(scores.masked_fill(~selectable, math.nan), padding, value=math.nan)
    scored = scored.unflatten(1, (-1, block))
    missing = scored.isnan()
    best = scored.masked_fill(missing, -math.inf).amax(2).masked_fill(missing.all(2), math.nan)
    return best, some


def among(candidates: Tensor, width: int, block: int) -> Tensor:
    """Which of `width` positions are in one of a row's listed blocks (B, width); bool."""
    count, ids = -(-width // block), candidates.long()
    found = torch.zeros(len(ids), count + 1, dtype=torch.bool, device=ids.device)
    inside = (ids >= 0) & (ids < count)
    found.scatter_(1, ids.masked_fill(~inside, count), True)
    return found[:, :count].repeat_interleave(block, dim=1)[:, :width]
