"""What a sample of groups of queries chooses, on ptxemu: exactly as counted by torch."""

from __future__ import annotations

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
from ptxemu.cutedsl import emulate

TOPK = 150


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
    indices = torch.randint(-9, num_keys + 9, (queries, TOPK), dtype=torch.int32,
                            generator=generator)  # fmt: skip
    indices[:, ::3] = indices[:1, ::3]
    lengths = torch.randint(-5, TOPK + 9, (queries,), dtype=torch.int32, generator=generator)
    rows, slots = count(indices, lengths.clamp(0, TOPK), num_keys, group)
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
    """Nor groups of short lists: 75 of eight queries that name the same rows, on few SMs and on
    many; so many rows that only some are counted."""
    queries, group, num_keys = 600, 8, 1_200_000
    of_group = torch.randint(num_keys, (-(-queries // group), TOPK), dtype=torch.int32)
    indices = of_group.repeat_interleave(group, 0)[:queries].contiguous()
    lengths = torch.full((queries,), TOPK, dtype=torch.int32)
    rows, slots = count(indices, lengths, num_keys, group)
    every = -(-num_keys // (WORDS * WORD_BITS))

    def time_of(items: int, slots: float, sms: int, list_us: float) -> float:
        own = ITEM_US + STEP_US * (slots / STEP_SLOTS + 0.5) + list_us
        return max(items / sms, 1) * own

    taken = []
    for num_sms in (2, 600):
        alone = time_of(queries, slots * every / SAMPLES / group, num_sms, 0)
        together = time_of(queries // group, rows * every / SAMPLES, num_sms, UNION_US)
        expected = FIRST if together + LISTS_US < MOST_TIME * alone else SECOND
        counts, choice = torch.zeros(2, dtype=torch.int32), torch.full((3,), -7, dtype=torch.int32)
        with emulate() as emulator:
            tensors = map(from_dlpack, (indices, lengths, counts, choice))
            sample_by_time(*tensors, num_keys, group, num_sms)
        assert list(emulator.findings) == []
        assert choice.tolist() == [expected, -7, -7]
        taken.append(expected)
    assert taken[0] == FIRST and taken[-1] == SECOND
