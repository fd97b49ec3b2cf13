"""Groups of queries on ptxemu: the union of what they name, and the sample that chooses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from flashdsa.kernels.attention.choice import (
    BLOCK,
    FIRST,
    LISTS_US,
    MOST_TIME,
    SAMPLE_THREADS,
    SAMPLES,
    SECOND,
    WORD_BITS,
    WORDS,
    Asked,
    Times,
    sample_kernel,
)
from flashdsa.kernels.attention.lists import UNORDERED_SHIFT, Lists, members_bits
from flashdsa.kernels.attention.union import launch_by_rows, union_kernel
from flashdsa.kernels.attention.union_slots import FAR_ROWS, RANGE_WORDS, THREADS
from ptxemu.cutedsl import emulate
from ptxemu.launch_setup import LaunchSetup

NUM_KEYS, TOPK, TILE, GROUPS = 1500, 700, 64, 2
COMPILED: dict[Any, Any] = {}
"""What `judge` has compiled: by the group, how rows are packed, and the queries."""


@cute.jit
def make_lists(
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    rows: cute.Tensor,
    members: cute.Tensor,
    counts: cute.Tensor,
    present: cute.Tensor,
    named: cute.Tensor,
    num_keys: Int32,
    group: cutlass.Constexpr,
    how: cutlass.Constexpr,
):
    """`how`: whether rows are packed, and whether that depends on `num_keys`."""
    packs, by_rows = how
    lists = Lists(rows, members, counts, present, named)

    def launch(packed: bool) -> None:
        kernel = union_kernel(
            indices, topk_length, lists, num_keys, group, TILE, None, packs=packed
        )
        kernel.launch(grid=[counts.shape[0], 1, 1], block=[THREADS, 1, 1])

    if cutlass.const_expr(by_rows):
        launch_by_rows(num_keys, launch, packs)
    else:
        launch(packs)


@cute.jit
def make_lists_that_pay(
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    rows: cute.Tensor,
    members: cute.Tensor,
    counts: cute.Tensor,
    num_keys: Int32,
    least_saved: Int32,
    group: cutlass.Constexpr,
):
    lists = Lists(rows, members, counts)
    kernel = union_kernel(
        indices, topk_length, lists, num_keys, group, 0, None, least_saved=least_saved
    )
    kernel.launch(grid=[counts.shape[0], 1, 1], block=[THREADS, 1, 1])


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


def judge(
    indices: Tensor,
    group: int,
    repeats: int,
    *,
    packs: bool,
    by_rows: bool = False,
    num_keys: int = NUM_KEYS,
) -> list[LaunchSetup]:
    """Rows ascend but for the repeats that a list's end is said to have, and every row has the
    queries that name it; the launches."""
    launched: list[LaunchSetup] = []
    groups = len(indices) // group
    rows = torch.full((groups, group * TOPK + TILE), -7, dtype=torch.int32)
    members = torch.zeros(rows.shape, dtype=torch.uint8 if group <= 8 else torch.int16)
    counts, present, named = (torch.full((groups,), -7, dtype=torch.int32) for _ in range(3))
    lengths = torch.empty(0, dtype=torch.int32)
    with emulate(on_launch=launched.append) as emulator:
        tensors = map(from_dlpack, (indices, lengths, rows, members, counts, present, named))
        given = (*tensors, Int32(num_keys))
        kind = group, (packs, by_rows), len(indices)
        if kind not in COMPILED:
            COMPILED[kind] = cute.compile(make_lists, *given, *kind[:2])
        COMPILED[kind](*given)
    assert list(emulator.findings) == []
    for number in range(groups):
        count, of = int(counts[number]), indices[number * group : (number + 1) * group]
        assert int(present[number]) >> UNORDERED_SHIFT == repeats
        assert int(named[number]) == int((of >= 0).sum())
        ordered = rows[number, : count - repeats]
        assert torch.equal(ordered, of[of >= 0].unique())
        bits = members[number, : count - repeats].to(torch.int32) & (2 ** members_bits(group) - 1)
        for query, own in enumerate(of):
            assert torch.equal(ordered[(bits >> query) & 1 == 1], own[own >= 0].unique())
    return launched


FORMS = [(2, False), (4, False), (16, False), (1, True), (2, True), (4, True)]
KINDS = ["dense", "windowed", "random", "sparse", "repeated"]
ALWAYS = [("windowed", 4), ("random", 4), ("sparse", 1), ("repeated", 4), ("repeated", 16)]
"""Beside dense lists of one query and of four; groups of two, whose rows have a byte or two bits,
come later."""


@pytest.mark.parametrize(
    ("kind", "group", "packs"),
    [
        pytest.param(
            *(kind, group, packs),
            marks=()
            if (kind == "dense" and group in (1, 4)) or (kind, group) in ALWAYS
            else pytest.mark.slow,
        )
        for kind in KINDS
        for group, packs in FORMS
    ],
)
def test_rows_ascend(kind: str, group: int, packs: bool) -> None:
    """Additions to dKV are in order by this; a row has a byte, or two, or no more bits than it
    needs."""
    indices = draw(kind, group * GROUPS)
    judge(indices, group, 8 * group if kind == "repeated" else 0, packs=packs)


def test_many_rows_are_packed_if_that_is_asked_for() -> None:
    """Rows that need two ranges of half a byte a row, of which the first and the last are named."""
    group, num_keys = 4, RANGE_WORDS * 8 + 5000
    near = draw("windowed", group)
    far = near + (near >= 0) * (near % 3) * (num_keys // 2 - 468)
    assert FAR_ROWS < far.max() < num_keys
    (of_few,) = judge(near, group, 0, packs=True, by_rows=True, num_keys=FAR_ROWS)
    (of_many,) = judge(far.int(), group, 0, packs=True, by_rows=True, num_keys=num_keys)
    assert of_few.kernel != of_many.kernel


@pytest.mark.parametrize("least_saved", [250, 251])
def test_lists_that_a_union_could_not_shorten_have_all_slots(least_saved: int) -> None:
    """Two queries name 300 and 250 of the same rows: a union may have 250 less than both."""
    group, lengths = 2, [300, 250]
    indices = torch.arange(TOPK, dtype=torch.int32).expand(group, -1).contiguous()
    indices[0, 7] = -1
    rows = torch.full((1, group * TOPK), -7, dtype=torch.int32)
    members = torch.zeros(rows.shape, dtype=torch.uint8)
    counts = torch.full((1,), -7, dtype=torch.int32)
    with emulate() as emulator:
        given = (indices, torch.tensor(lengths, dtype=torch.int32), rows, members, counts)
        make_lists_that_pay(*map(from_dlpack, given), Int32(NUM_KEYS), Int32(least_saved), group)
    assert list(emulator.findings) == []
    if least_saved <= 250:
        assert torch.equal(rows[0, :300], torch.arange(300, dtype=torch.int32))
        expected = torch.tensor([3] * 250 + [1] * 50, dtype=torch.uint8)
        expected[7] = 2
    else:
        assert torch.equal(rows[0, :550], torch.cat([indices[0, :300], indices[1, :250]]))
        expected = torch.tensor([1] * 300 + [2] * 250, dtype=torch.uint8)
        expected[7] = 0
    assert int(counts[0]) == len(expected)
    assert torch.equal(members[0, : len(expected)], expected)


SAMPLE_TOPK = 150


@cute.jit
def sample(
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    counts: cute.Tensor,
    choice: cute.Tensor,
    num_keys: cutlass.Constexpr,
    ratio: cutlass.Constexpr,
    group: cutlass.Constexpr,
    keeps: cutlass.Constexpr,
):
    groups = (indices.shape[0] + group - 1) // group
    asked = Asked(indices, topk_length, Int32(num_keys), Float32(ratio))
    sample_kernel(asked, counts.iterator, choice, group, keeps).launch(
        grid=[cutlass.min(groups, SAMPLES), 1, 1], block=[SAMPLE_THREADS, 1, 1]
    )


def count(indices: Tensor, lengths: Tensor, num_keys: int, group: int) -> tuple[int, int]:
    """Rows that groups name, and the slots that name them."""
    every = -(-num_keys // (WORDS * WORD_BITS))
    groups = -(-len(indices) // group)
    samples = min(groups, SAMPLES)
    rows = slots = 0
    for number in range(samples):
        first = number * groups // samples * group
        valid = [
            row
            for query in range(first, min(first + group, len(indices)))
            for row in indices[query, : int(lengths[query])].tolist()
            if 0 <= row < num_keys and row // BLOCK % every == 0
        ]
        rows, slots = rows + len(set(valid)), slots + len(valid)
    assert slots > 0
    return rows, slots


@pytest.mark.parametrize(
    ("queries", "group", "num_keys", "keeps"),
    [(7, 4, 400, True), (131, 2, 5000, False), (9, 8, 1_200_000, False)],
)
def test_it_chooses_by_the_rows_that_groups_name(
    queries: int, group: int, num_keys: int, keeps: bool
) -> None:
    """Fewer groups than a sample has and more, rows that are all counted and that are not, slots
    that are not valid, lengths; twice, as the counts are 0 again."""
    generator = torch.Generator().manual_seed(queries)
    indices = torch.randint(-9, num_keys + 9, (queries, SAMPLE_TOPK), dtype=torch.int32,
                            generator=generator)  # fmt: skip
    indices[:, ::3] = indices[:1, ::3]
    lengths = torch.randint(-5, SAMPLE_TOPK + 9, (queries,), dtype=torch.int32, generator=generator)
    rows, slots = count(indices, lengths.clamp(0, SAMPLE_TOPK), num_keys, group)
    kept = [rows, slots] if keeps else [-7, -7]
    counts, choice = torch.zeros(2, dtype=torch.int32), torch.full((3,), -7, dtype=torch.int32)
    with emulate() as emulator:
        for factor, chosen in ((1.001, FIRST), (0.999, SECOND)):
            tensors = indices, lengths, counts, choice
            sample(
                *map(from_dlpack, tensors), num_keys, rows * group / slots * factor, group, keeps
            )
            assert (choice.tolist(), counts.tolist()) == ([chosen, *kept], [0, 0])
    assert list(emulator.findings) == []


ITEM_US, STEP_US, STEP_SLOTS, UNION_US = 3.0, 3.5, 128, 0.7


@cute.jit
def sample_by_time(
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    counts: cute.Tensor,
    choice: cute.Tensor,
    num_keys: cutlass.Constexpr,
    group: cutlass.Constexpr,
    num_sms: Int32,
):
    asked = Asked(indices, topk_length, Int32(num_keys), Float32(group))
    times = Times(*map(Float32, (ITEM_US, STEP_US, STEP_SLOTS, UNION_US)), num_sms)
    groups = (indices.shape[0] + group - 1) // group
    sample_kernel(asked, counts.iterator, choice, group, False, times).launch(
        grid=[cutlass.min(groups, SAMPLES), 1, 1], block=[SAMPLE_THREADS, 1, 1]
    )


def test_groups_that_are_too_few_for_the_sms_are_not_taken() -> None:
    """Nor groups of short lists: 20 of eight queries that name the same rows, on few SMs and on
    many; so many rows that only some are counted."""
    queries, group, num_keys = 160, 8, 1_200_000
    samples = min(SAMPLES, queries // group)
    of_group = torch.randint(num_keys, (-(-queries // group), SAMPLE_TOPK), dtype=torch.int32)
    indices = of_group.repeat_interleave(group, 0)[:queries].contiguous()
    lengths = torch.full((queries,), SAMPLE_TOPK, dtype=torch.int32)
    rows, slots = count(indices, lengths, num_keys, group)
    every = -(-num_keys // (WORDS * WORD_BITS))

    def time_of(items: int, slots: float, sms: int, list_us: float) -> float:
        own = ITEM_US + STEP_US * (slots / STEP_SLOTS + 0.5) + list_us
        return max(items / sms, 1) * own

    taken = []
    for num_sms in (2, 600):
        alone = time_of(queries, slots * every / samples / group, num_sms, 0)
        together = time_of(queries // group, rows * every / samples, num_sms, UNION_US)
        expected = FIRST if together + LISTS_US < MOST_TIME * alone else SECOND
        counts, choice = torch.zeros(2, dtype=torch.int32), torch.full((3,), -7, dtype=torch.int32)
        with emulate() as emulator:
            tensors = map(from_dlpack, (indices, lengths, counts, choice))
            sample_by_time(*tensors, num_keys, group, num_sms)
        assert list(emulator.findings) == []
        assert choice.tolist() == [expected, -7, -7]
        taken.append(expected)
    assert taken[0] == FIRST and taken[-1] == SECOND
