"""Blocks of rows: ids of their rows, and of a query's own incomplete block; valid ids first."""

from __future__ import annotations

import torch
from torch import Tensor

from flashdsa.dispatch import checks

__all__ = ["expand_blocks"]


def expand_blocks(indices: Tensor, block: int, *, positions: Tensor | None = None) -> Tensor:
    """Ids of the rows of blocks, in their order: id ``i`` stands for rows ``i * block`` to
    ``i * block + block - 1``. With `positions` those rows of each query's own block follow that it
    sees, if it sees some and not all: `block - 1` more columns.

    `sparse_mla` takes blocks as they are (`index_block`, and a range for the own block); these ids
    are for kernels and backwards that do not.

    Args:
        indices: (S, topk) int32 or int64; a negative id stands for no row.
        block: rows of a block.
        positions: (S,) int32 or int64, the row of each query.

    Returns:
        (S, topk * block), or (S, topk * block + block - 1), int32, -1 where there is no row.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    checks.require_tensor("indices", indices)
    checks.require_dtype("indices", indices, torch.int32, torch.int64)
    checks.require_rank("indices", indices, (2,), "[S, topk]")
    checks.require_positive("block", block)
    offset = torch.arange(block, device=indices.device)
    ids = checks.as_int32(indices, -1).long()[..., None]  # INVARIANT: times block it fits int64
    rows = torch.where(ids >= 0, ids * block + offset, -1).flatten(1)
    if positions is not None:
        checks.require_tensor("positions", positions)
        checks.require_dtype("positions", positions, torch.int32, torch.int64)
        checks.require_shape("positions", positions, indices.shape[:1], "[S]")
        checks.require_device("positions", positions, indices.device, "indices")
        own = checks.as_int32(positions, -1).long()[:, None]
        tail = (own + 1) // block * block + offset[:-1]
        rows = torch.cat((rows, torch.where(tail <= own, tail, -1)), dim=1)
    return checks.as_int32(rows, -1)


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
