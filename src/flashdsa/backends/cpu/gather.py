"""Gather of the kv rows that a tile of queries names, and of the mask of valid slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.packed_rows import is_packed, unpack
from flashdsa.row_formats import V32


class GatheredRows(NamedTuple):
    """The rows of one tile.

    INVARIANT: rows of invalid slots are zero, whatever kv holds: 0 * row is 0 and never NaN.
    """

    rows: Tensor
    """(queries, keys, d_qk), compute dtype."""
    row_ids: Tensor
    """(queries, keys) int32, in [0, S_kv) everywhere; meaningless where invalid."""
    valid: Tensor | None
    """(queries, keys) bool, or None when every slot is valid."""


def gather_rows(
    kv: Tensor, indices: Tensor, first_slot: int, topk_length: Tensor | None, dtype: torch.dtype
) -> GatheredRows:
    """Gather kv[indices], zero where a slot is invalid.

    Args:
        kv: (S_kv, d_qk) or packed rows (S_kv, 656), S_kv >= 1.
        indices: (queries, keys) int32, any values.
        first_slot: position of the first of these keys among the query's topk slots.
        topk_length: (queries,) int32 or None; slots at or beyond it are invalid.
        dtype: dtype of the gathered rows.
    """
    queries, keys = indices.shape
    valid = (indices >= 0) & (indices < kv.shape[0])
    if topk_length is not None:
        slots = torch.arange(first_slot, first_slot + keys, dtype=torch.int32)
        valid &= slots < topk_length[:, None]
    every_slot = bool(valid.all())
    row_ids = indices if every_slot else indices.masked_fill(~valid, 0)
    rows = kv.index_select(0, row_ids.reshape(-1))
    rows = unpack(rows, V32, dtype) if is_packed(kv) else rows.to(dtype)
    rows = rows.view(queries, keys, -1)
    if every_slot:
        return GatheredRows(rows, row_ids, None)
    return GatheredRows(rows.masked_fill_(~valid[..., None], 0), row_ids, valid)
