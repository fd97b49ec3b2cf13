"""Ids of lists, as integrations and ranks make them."""

from __future__ import annotations

import torch
from torch import Tensor


def valid_first(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Each list's ids that are not negative first, in their order, then -1.

    Args:
        ids: (B, n) int32.

    Returns:
        ids (B, n) int32; their number (B,) int32.
    """
    valid, n = ids >= 0, ids.shape[1]
    # Each id has a place of its own: those that are not valid come last.
    upto = valid.cumsum(1)
    number = torch.arange(1, n + 1, device=ids.device)
    place = torch.where(valid, upto - 1, n - number + upto)
    packed = torch.empty_like(ids).scatter_(1, place, ids.clamp_min(-1))
    return packed, valid.sum(1, dtype=torch.int32)
