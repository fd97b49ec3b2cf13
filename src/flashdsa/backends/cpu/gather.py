"""Gather of the kv rows that a tile of queries names, and of the mask of valid slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.tiling import CPU, Mode, QueryTile, spans
from flashdsa.backends.packed_rows import form_of, num_rows, take, unpack
from flashdsa.row_formats import RowFormat

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands, SparseMlaOutOperands
    from flashdsa.ops.attention_backward import MlaBwdOperands


class RowList(NamedTuple):
    """A source and each query's list of its rows: slot i names row `ids[i // rows_of_id] * step + i
    % rows_of_id`."""

    kv: Tensor
    """(S_kv, d_qk), or packed rows or pages."""
    ids: Tensor
    """(S, topk) integers, any values."""
    lengths: Tensor | None
    """(S,) integers, slots in use."""
    slots: int
    """Slots of the longest list."""
    rows_of_id: int = 1
    step: int = 1
    form: RowFormat | None = None
    """Format of packed rows."""
    whole_blocks: bool = False
    """Spans are of `k_block` slots, and those without a valid one are left out if that is read."""
    mode: Mode = CPU

    def in_whole_blocks(self) -> RowList:
        """The same list of spans whose sizes do not depend on the other queries' lists."""
        return self._replace(whole_blocks=True)

    def row_numbers(self, queries: slice, first: int, last: int) -> Tensor:
        """Rows (queries, keys) that slots [`first`, `last`) name; invalid ones any numbers outside
        [0, S_kv)."""
        if self.rows_of_id == 1:
            return self.ids[queries, first:last]
        slot = torch.arange(first, last, device=self.ids.device)
        ids = self.ids[queries, slot // self.rows_of_id].long()
        return ids * self.step + slot % self.rows_of_id

    def gather(self, tile: QueryTile, dtype: torch.dtype) -> Iterator[GatheredRows]:
        """The tile's rows in compute dtype `dtype`, in spans of its `k_block` slots."""
        queries = slice(tile.first, tile.last)
        lengths, slots = self.lengths, self.slots
        if lengths is not None:
            lengths = lengths[queries]
            # Those of a range are far apart in prefill.
            if self.rows_of_id != self.step and self.mode.reads:
                slots = int(lengths.max())
        for first, last in spans(slots, tile.k_block):
            row_numbers = self.row_numbers(queries, first, last)
            if self.whole_blocks:
                missing = tile.k_block - (last - first)
                row_numbers = torch.nn.functional.pad(row_numbers, (0, missing), value=-1)
            gathered = gather_rows(
                self.kv, row_numbers, first, lengths, dtype, self.form, self.mode
            )
            may_skip = self.whole_blocks and self.mode.reads
            if may_skip and gathered.valid is not None and not gathered.valid.any():
                continue
            yield gathered


def row_lists(
    operands: SparseMlaOperands | SparseMlaOutOperands | MlaBwdOperands,
    index_block: int,
    kv_format: str | None = None,
    mode: Mode = CPU,
) -> list[RowList]:
    """The lists of a call, of kv's rows and of extra_kv's, if it is there."""
    x = operands
    lists = [_row_list(x.kv, x.indices, x.topk_length, x.ends, index_block, mode.reads)]
    if x.extra_kv is not None:
        assert x.extra_indices is not None
        extra = x.extra_indices, x.extra_topk_length, x.extra_ends
        lists.append(_row_list(x.extra_kv, *extra, 1, mode.reads))
    return [one._replace(form=form_of(one.kv, kv_format), mode=mode) for one in lists]


def _row_list(
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    ends: Tensor | None,
    block: int,
    reads: bool,
) -> RowList:
    """A list of ids of `block` rows, or of starts if there are ends."""
    count = num_rows(kv)
    if not count or not indices.shape[0]:
        return RowList(kv, indices, topk_length, 0)
    if ends is not None:
        starts = indices.long().clamp(0, count)
        lengths = (ends.clamp(0, count) - starts[:, 0]).clamp(min=0)
        most = int(lengths.max()) if reads else count
        return RowList(kv, starts, lengths, most, max(most, 2), 1)
    block = min(block, count)  # INVARIANT: id * block fits int64; any id but 0 stays invalid
    if topk_length is not None and block > 1:
        topk_length = topk_length.long() * block
    return RowList(kv, indices, topk_length, indices.shape[1] * block, block, block)


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
    mode: Mode = CPU,
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
        slots = torch.arange(
            first_slot, first_slot + keys, dtype=torch.int32, device=indices.device
        )
        valid &= slots < topk_length[:, None]
    every_slot = mode.reads and bool(valid.all())
    row_ids = indices if every_slot else indices.masked_fill(~valid, 0)
    rows = take(kv, form, row_ids.reshape(-1))
    rows = rows.to(dtype) if form is None else unpack(rows, form, dtype)
    rows = rows.view(queries, keys, -1)
    if every_slot:
        return GatheredRows(rows, row_ids, None)
    return GatheredRows(rows.masked_fill_(~valid[..., None], 0), row_ids, valid)
