"""Blocks of positions in torch, on any device: their scores, and the positions of listed ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_NONE = torch.iinfo(torch.int32).max
"""Stands for a candidate that names nothing; orders it after every block."""


def block_scores(
    scores: Tensor, ranked: Tensor, lengths: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """Scores (rows, ceil(width / block)) fp32 of blocks, and which have a position to choose: the
    best score of each, NaN where none is a number, and infinity where the newest position is.

    Blocks of one position have its score.

    Args:
        scores: (rows, width) fp32.
        ranked: (rows, width) bool: False where a position may not be chosen.
        lengths: (rows,) positions, the last of which is the newest.
    """
    scored = torch.where(ranked, scores, math.nan)
    if block == 1:
        return scored, ranked
    padding = (0, -scores.shape[1] % block)
    some = torch.nn.functional.pad(ranked, padding).unflatten(1, (-1, block)).any(2)
    scored = torch.nn.functional.pad(scored, padding, value=math.nan).unflatten(1, (-1, block))
    missing = scored.isnan()
    best = scored.masked_fill(missing, -math.inf).amax(2)
    best = best.masked_fill(missing.all(2), math.nan)
    newest = (lengths.long() - 1)[:, None] // block  # -1 of an empty row
    ids = torch.arange(best.shape[1], device=best.device)
    return torch.where((ids == newest) & some, math.inf, best), some


def candidate_positions(candidates: Tensor, lengths: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Positions (rows, n * block) int64 of the listed blocks, ascending, and how many (rows,).

    What follows a row's last one lies at or beyond its length.

    Args:
        candidates: (rows, n) ids of blocks; those of no visible block, and repeated ones, add
            nothing. lengths: (rows,) visible positions.
    """
    ids = candidates.long()
    ids = torch.where((ids >= 0) & (ids * block < lengths[:, None]), ids, _NONE).sort(1).values
    ids[:, 1:] = torch.where(ids[:, 1:] == ids[:, :-1], _NONE, ids[:, 1:])
    ids = ids.sort(1).values
    positions = ids[..., None] * block + torch.arange(block, device=ids.device)
    positions = positions.flatten(1)
    return positions, (positions < lengths[:, None]).sum(1)
