"""Unions of the rows that neighbouring queries select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdsa.errors import ArgumentTypeError, ArgumentValueError

GROUPS = (1, 2, 4, 8)
_SLOTS_AT_ONCE = 1 << 22
"""Slots of one sort: 32 MiB of int64, and as much again for its result."""


@dataclass(frozen=True)
class GroupOverlap:
    """Groups of `queries` neighbours and the unions of the rows that they select.

    Attributes:
        queries: of a group.
        groups: their number; the last queries of a sequence, too few for one, are left out.
        named_rows: mean over groups: the rows of its queries, one by one.
        union_rows: mean over groups: distinct rows.
        ratio: union_rows over a query's mean rows: 1 if the queries of a group select the same
            rows, `queries` if they share none. The rule of `mla_bwd` on Hopper reads this number.
        smallest, largest: ratios of single groups, the 5 % smallest and largest left out.
    """

    queries: int
    groups: int
    named_rows: float
    union_rows: float
    ratio: float
    smallest: float
    largest: float

    @property
    def left(self) -> float:
        """Share of rows gathered, and of rows of dKV added to, that grouping leaves: in (0, 1]."""
        return self.union_rows / self.named_rows


@dataclass(frozen=True)
class Overlap:
    """The result of `measure_overlap`.

    Attributes:
        sequences, queries, topk: of the tensor.
        valid: share of its slots that name a row.
        distinct: share of those that no earlier slot of the query names.
        shared: of a query's distinct rows, the share that the query before selects too.
        groups: one entry for each size of groups.
        kept: by a distance below the number of queries: of a query's distinct rows, the share that
            the query so many before selects too. The rest is lost if that one's list is reused.
    """

    sequences: int
    queries: int
    topk: int
    valid: float
    distinct: float
    shared: float
    groups: tuple[GroupOverlap, ...]
    kept: dict[int, float]


def measure_overlap(indices: Tensor, groups: Sequence[int] = GROUPS) -> Overlap:
    """Measure union ratios of neighbouring queries.

    Args:
        indices: [S, topk], [batch, S, topk] or, as FlashMLA has it, [S, 1, topk]; any integers.
            Negative ones name no row. Groups do not reach from one sequence into the next.
        groups: sizes, at least 1 and at most S.

    Raises:
        ArgumentTypeError: indices are not integers. ArgumentValueError: a shape, or a size of
            groups, or no query names a row.
    """
    rows = _as_sequences(indices)  # [batch, S, topk] int64, -1 for none
    sequences, queries, topk = rows.shape
    wrong = [size for size in groups if not 1 <= size <= queries]
    if wrong or not groups:
        raise ArgumentValueError(
            f"groups: expected sizes from 1 to {queries}, the number of queries; got {list(groups)}"
        )
    valid = int((rows >= 0).sum())
    if not valid:
        raise ArgumentValueError("indices: no slot names a row: all are negative")
    alone = _distinct_rows(rows, 1)  # [batch, S]
    distances = [1, *(size for size in groups if 1 < size < queries)]
    kept = {by: _recall(rows[:, :-by], rows[:, by:]) for by in distances if by < queries}
    return Overlap(
        sequences,
        queries,
        topk,
        valid / rows.numel(),
        int(alone.sum()) / valid,
        kept.get(1, 0.0),
        tuple(_group_overlap(rows, alone, size) for size in groups),
        kept,
    )


def _recall(lists: Tensor, own: Tensor) -> float:
    """Share of the distinct rows in `own` that are in `lists`; both [batch, S, any] int64."""
    together = _distinct_rows(torch.cat((lists, own), dim=2), 1)
    wanted = _distinct_rows(own, 1)
    return float((_distinct_rows(lists, 1) + wanted - together).sum()) / max(1, int(wanted.sum()))


def _as_sequences(indices: Tensor) -> Tensor:
    if not isinstance(indices, Tensor):
        raise ArgumentTypeError(f"indices: expected a tensor, got {type(indices).__name__}")
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise ArgumentTypeError(f"indices: expected integers, got {indices.dtype}")
    if indices.dim() not in (2, 3) or not indices.numel():
        raise ArgumentValueError(
            "indices: expected [S, topk], [batch, S, topk] or [S, 1, topk], not empty; got "
            f"{list(indices.shape)}"
        )
    rows = indices.cpu().long()
    if rows.dim() == 3 and rows.shape[1] == 1:
        rows = rows[:, 0]
    return rows.reshape(-1, *rows.shape[-2:]).clamp(min=-1)


def _distinct_rows(rows: Tensor, size: int) -> Tensor:
    """Count distinct rows of each group: [batch, S, topk] -> [batch, S // size]."""
    sequences, queries, topk = rows.shape
    groups = queries // size
    slots = rows[:, : groups * size].reshape(sequences * groups, size * topk)
    counts = []
    for part in slots.split(max(1, _SLOTS_AT_ONCE // slots.shape[1])):
        ordered = part.sort(dim=1).values
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        counts.append((first & (ordered >= 0)).sum(dim=1))
    return torch.cat(counts).reshape(sequences, groups)


def _group_overlap(rows: Tensor, alone: Tensor, size: int) -> GroupOverlap:
    union = _distinct_rows(rows, size).double()  # [batch, groups]
    groups = union.shape[1]
    named = alone[:, : groups * size].reshape(*union.shape, size).sum(dim=2).double()
    some = named > 0
    ratios = union[some] * size / named[some]
    low, high = ratios.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
    return GroupOverlap(
        size,
        union.numel(),
        float(named.mean()),
        float(union.mean()),
        float(union.sum() * size / named.sum()),
        low,
        high,
    )
