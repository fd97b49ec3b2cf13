"""The union of what a group's queries name, on ptxemu: which rows are listed, in which order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from flashdsa.kernels.attention.lists import UNORDERED_SHIFT, Lists, members_bits
from flashdsa.kernels.attention.union import THREADS, union_kernel
from ptxemu.cutedsl import emulate

NUM_KEYS, TOPK, TILE, GROUPS = 1500, 700, 64, 2


@cute.jit
def make_lists(
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    rows: cute.Tensor,
    members: cute.Tensor,
    counts: cute.Tensor,
    present: cute.Tensor,
    named: cute.Tensor,
    group: cutlass.Constexpr,
):
    lists = Lists(rows, members, counts, present, named)
    union_kernel(indices, topk_length, lists, Int32(NUM_KEYS), group, TILE, None).launch(
        grid=[counts.shape[0], 1, 1], block=[THREADS, 1, 1]
    )


def draw(kind: str, queries: int) -> Tensor:
    """(queries, TOPK) int32 of distinct rows, but where they are to be repeated.

    Args:
        kind: how much of a stretch of rows is named: all, most, few; or one row again and again.
    """
    generator = torch.Generator().manual_seed(queries)
    table = torch.full((queries, TOPK), -1, dtype=torch.int32)
    for query in range(queries):
        if kind == "dense":
            rows = torch.arange(TOPK) + 61 * query % 800
        elif kind == "windowed":
            rows = torch.randperm(900, generator=generator)[:TOPK] + 37
        else:
            rows = torch.randperm(NUM_KEYS, generator=generator)[: 40 if kind == "sparse" else TOPK]
        table[query, : len(rows)] = rows[torch.randperm(len(rows), generator=generator)]
    if kind == "repeated":
        table[:, 1:9] = table[:, :1]
    return table


@pytest.mark.parametrize("group", [2, 4, 16])
@pytest.mark.parametrize("kind", ["dense", "windowed", "random", "sparse", "repeated"])
def test_rows_ascend(kind: str, group: int) -> None:
    """Additions to dKV are in order by this, but for the repeats that a list's end is said to have;
    every row has the queries that name it."""
    queries = group * GROUPS
    indices = draw(kind, queries)
    rows = torch.full((GROUPS, group * TOPK + TILE), -7, dtype=torch.int32)
    members = torch.zeros(rows.shape, dtype=torch.uint8 if group <= 8 else torch.int16)
    counts, present, named = (torch.full((GROUPS,), -7, dtype=torch.int32) for _ in range(3))
    lengths = torch.empty(0, dtype=torch.int32)
    with emulate() as emulator:
        tensors = (indices, lengths, rows, members, counts, present, named)
        make_lists(*map(from_dlpack, tensors), group)
    assert list(emulator.findings) == []
    for number in range(GROUPS):
        count, of = int(counts[number]), indices[number * group : (number + 1) * group]
        repeats = int(present[number]) >> UNORDERED_SHIFT
        assert repeats == (8 * group if kind == "repeated" else 0)
        ordered = rows[number, : count - repeats]
        assert torch.equal(ordered, of[of >= 0].unique())
        bits = members[number, : count - repeats].to(torch.int32) & (2 ** members_bits(group) - 1)
        for query, own in enumerate(of):
            assert torch.equal(ordered[(bits >> query) & 1 == 1], own[own >= 0].unique())
