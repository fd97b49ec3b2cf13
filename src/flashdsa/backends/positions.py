"""Order of rows of selected positions."""

from __future__ import annotations

import torch
from torch import Tensor

_BEHIND = torch.iinfo(torch.int32).max
"""Key that orders negative entries after every position."""


def ascending(positions: Tensor) -> Tensor:
    """Each row of (rows, topk) int32 in ascending order, its negative entries as -1 at the end."""
    ordered = torch.where(positions < 0, _BEHIND, positions).sort(dim=1).values
    return torch.where(ordered == _BEHIND, -1, ordered)
