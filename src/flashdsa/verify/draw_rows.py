"""Lists of rows of sparse MLA cases: ids, ranges, blocks, and what is planted in their sources."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashdsa.problem import INT32_MAX
from flashdsa.reference import valid_slots

if TYPE_CHECKING:
    from flashdsa.verify.sparse_mla_cases import SparseMlaCase

INT32_MIN = -(2**31)


def invalid_values(num_keys: int) -> list[int]:
    """Index values that name no kv row."""
    return [-1, num_keys, INT32_MIN, num_keys + 7, INT32_MAX, -2]


def length_values(topk: int) -> list[int]:
    """Values of topk_length, inside and outside [0, topk]."""
    return [max(1, topk // 2), 0, topk, -5, topk + 9, 1, INT32_MAX, INT32_MIN]


def _draw_indices(case: SparseMlaCase, lengths: list[int], generator: torch.Generator) -> Tensor:
    """int32 `[S, topk]`."""
    n, topk = case.num_keys, case.topk
    reserved = [0, n - 1] if case.poison and n >= 3 else []
    usable = torch.tensor([row for row in range(n) if row not in reserved], dtype=torch.int64)
    bad = torch.tensor(invalid_values(n), dtype=torch.int64)
    table = torch.full((case.num_queries, topk), -1, dtype=torch.int64)
    for s in range(case.num_queries):
        if len(usable) and case.duplicates:
            pool = usable[torch.randperm(len(usable), generator=generator)][: len(usable) // 4 + 1]
            table[s] = pool[torch.randint(len(pool), (topk,), generator=generator)]
        elif len(usable):
            rows = usable[torch.randperm(len(usable), generator=generator)][:topk]
            table[s, : len(rows)] = rows
        if case.invalid or (case.empty_rows and s % 3 == 0):
            replaced = torch.rand(topk, generator=generator) < 0.3
            if case.empty_rows and s % 3 == 0:
                replaced[:] = True
            drawn = torch.randint(len(bad), (topk,), generator=generator)
            table[s] = torch.where(replaced, bad[drawn], table[s])
        if reserved:
            beyond = torch.arange(topk) >= lengths[s]
            table[s] = torch.where(beyond, torch.tensor(reserved)[torch.arange(topk) % 2], table[s])
    return table.to(torch.int32)


def _draw_range(
    case: SparseMlaCase, num_keys: int, most: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Starts and ends `[S]`, int32, of lengths about those of a window and of a pool's tail.

    They name neither the first row nor the last: those that hold no row clamp or wrap to them.
    """
    lengths = torch.tensor([most, 1, 0, 3, 4, 5, 127, 128, 129]).clamp(max=most)
    turn = torch.arange(case.num_queries)  # each length once more, elsewhere, after nine queries
    lengths = lengths[(turn + turn // 9) % 9].clamp(max=max(num_keys - 2, 0))
    drawn = torch.rand(case.num_queries, generator=generator)
    starts = 1 + (drawn * (num_keys - 1 - lengths)).long()
    ends = starts + lengths
    if not case.poison:  # three rows outside the source: the rest of the window counts
        starts[7::18], ends[7::18] = -3, lengths[7::18] - 3
        starts[16::18], ends[16::18] = num_keys + 3 - lengths[16::18], num_keys + 3
    nothing = torch.tensor(
        [[-5, 0], [num_keys, INT32_MAX], [7, 2], [INT32_MAX, INT32_MIN], [INT32_MIN, -1]]
    )
    for s in range(case.num_queries):
        if (case.empty_rows and s % 3 == 0) or (case.invalid and s % 7 == 5):
            starts[s], ends[s] = nothing[s % len(nothing)]
    return starts.to(torch.int32), ends.to(torch.int32)


class RowList(NamedTuple):
    """A list of rows; of a range `indices` are the starts."""

    indices: Tensor
    lengths: Tensor | None
    ends: Tensor | None
    named: list[Tensor]


def draw_list(
    case: SparseMlaCase, source: str, num_keys: int, topk: int, generator: torch.Generator
) -> RowList:
    """The list of a source."""
    if source in case.ranges.split(" and "):
        starts, ends = _draw_range(case, num_keys, topk, generator)
        return RowList(starts, None, ends, valid_slots((starts, ends), num_keys))
    block = case.index_block if source == "kv" else 1
    values = length_values(topk)
    lengths = [values[s % len(values)] for s in range(case.num_queries)]
    if not case.topk_length:
        lengths = [topk] * case.num_queries
    of_ids = replace(case, num_keys=-(-num_keys // block), topk=topk)
    indices = _draw_indices(of_ids, lengths, generator)
    topk_length = torch.tensor(lengths, dtype=torch.int32) if case.topk_length else None
    return RowList(indices, topk_length, None, valid_slots(indices, num_keys, topk_length, block))


def poison_rows(kv: Tensor, named: list[Tensor]) -> None:
    """NaN, +inf and -inf in the rows that no list names."""
    rows = set(torch.cat([*named, torch.empty(0)]).tolist())
    poisons = (torch.nan, torch.inf, -torch.inf)
    for row in range(len(kv)):
        if row not in rows:
            kv[row] = poisons[row % 3]


def plant_nan_row(kv: Tensor, indices: Tensor) -> None:
    """NaN in the middle row, which the middle query's first slot names, and no other slot."""
    row, query = len(kv) // 2, len(indices) // 2
    indices[indices == row] = -1
    indices[query, 0] = row
    kv[row] = torch.nan


def draw_sink(case: SparseMlaCase, generator: torch.Generator) -> Tensor | None:
    """`[H]` fp32, or None where the case has no sink."""
    if case.attn_sink is None:
        return None
    sink = torch.randn(case.num_heads, generator=generator) + math.log(case.topk) + case.logit_shift
    if case.attn_sink == "infinite":
        sink[0::3], sink[1::3] = torch.inf, -torch.inf
    return sink
