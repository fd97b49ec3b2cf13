"""Gather of the kv rows that a tile of queries names, and of the mask of valid slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.packed_rows import num_rows, take, unpack
from flashdsa.row_formats import RowFormat


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
    kv: Tensor,
    indices: Tensor,
    first_slot: int,
    topk_length: Tensor | None,
    dtype: torch.dtype,
    form: RowFormat | None = None,
) -> GatheredRows:
    """Gather kv[indices], zero where a slot is invalid.

    Args:
        kv: (S_kv, d_qk), or packed rows or pages, S_kv >= 1.
        indices: (queries, keys) int32, any values.
        first_slot: position of the first of these keys among the query's topk slots.
        topk_length: (queries,) int32 or None; slots at or beyond it are invalid.
        dtype: dtype of the gathered rows.
        form: of packed rows.
    """
    queries, keys = indices.shape
    valid = (indices >= 0) & (indices < num_rows(kv))
    if topk_length is not None:
        slots = torch.arange(first_slot, first_slot + keys, dtype=torch.int32)
        valid &= slots < topk_length[:, None]
    every_slot = bool(valid.all())
    row_ids = indices if every_slot else indices.masked_fill(~valid, 0)
    rows = take(kv, form, row_ids.reshape(-1))
    rows = rows.to(dtype) if form is None else unpack(rows, form, dtype)
    rows = rows.view(queries, keys, -1)
    if every_slot:
        return GatheredRows(rows, row_ids, None)
    return GatheredRows(rows.masked_fill_(~valid[..., None], 0), row_ids, valid)
