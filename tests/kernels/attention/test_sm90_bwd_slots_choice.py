"""The choice between additions to dKV and slots in the Hopper backward, on ptxemu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

import flashdsa
from flashdsa.backends.emulated.devices import SMALL
from flashdsa.backends.emulated.runner import emulation
from flashdsa.backends.sm90 import mla_bwd_choice
from flashdsa.heuristics.h200 import Backward
from flashdsa.kernels.attention.choice import FIRST, SECOND
from flashdsa.kernels.attention.lists import Lists
from flashdsa.kernels.attention.sm90.bwd_per_item import plan, slots_choice
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import ORDER, WAY
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import forward_results, judge_backward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu.cutedsl import emulate
from tests.kernels.findings import unexpected

NUM_KEYS, KEYS, WAVE, BLOCKS = 5000, 300, 7, 2


@cute.jit
def choose(
    lists: tuple[cute.Tensor, cute.Tensor, cute.Tensor], tickets: cute.Tensor, choice: cute.Tensor
):
    asked = slots_choice.Asked(Lists(*lists), tickets, Int32(NUM_KEYS), Int32(WAVE), Int32(BLOCKS))
    made = slots_choice.slots_choice_kernel(asked, choice)
    made.launch(grid=[slots_choice.SAMPLES, 1, 1], block=[slots_choice.THREADS, 1, 1])


def chosen(
    rows: torch.Tensor, counts: torch.Tensor, order: torch.Tensor, choice: int = SECOND
) -> int:
    """The way that the kernel writes."""
    tickets = torch.zeros(ORDER + len(order), dtype=torch.int32)
    tickets[ORDER:] = order
    of_lists = rows, torch.zeros(1, 1, dtype=torch.uint8), counts
    with emulate() as emulator:
        operands = tuple(map(from_dlpack, of_lists)), from_dlpack(tickets)
        choose(*operands, from_dlpack(torch.tensor([choice], dtype=torch.int32)))
    assert list(emulator.findings) == []
    return int(tickets[WAY])


def random_lists(groups: int, seed: int) -> torch.Tensor:
    """Ascending, of KEYS keys."""
    generator = torch.Generator().manual_seed(seed)
    every = [torch.randperm(NUM_KEYS, generator=generator)[:KEYS] for _ in range(groups)]
    return torch.stack(every).sort().values.int()


def shares(threshold: float) -> Callable[[Any, Any, Any], Any]:
    """Slots save time if more than that share of the additions comes from memory."""
    return lambda additions, rows, sums: rows - threshold * additions


@pytest.mark.parametrize(
    ("distinct", "by_order"),
    [
        (True, False),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((True, True), (False, True))),
    ],
)
def test_keys_of_a_wave_are_counted(
    distinct: bool, by_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random lists, or each of them WAVE times, which only a wave of the order shows."""
    waves = 6
    if distinct:
        rows = random_lists(WAVE * waves, 1)
    else:
        rows = random_lists(waves, 2).repeat_interleave(WAVE, 0)
    order = torch.arange(len(rows), dtype=torch.int32)
    alike = not distinct and not by_order
    if by_order:
        order = order.view(waves, WAVE).T.reshape(-1).contiguous()
    named = rows[order.long()]
    found = [len(named[i : i + WAVE].unique()) for i in range(len(named) - WAVE + 1)]
    share = sum(found) / len(found) / (WAVE * KEYS * BLOCKS)
    assert share < 2 / WAVE / BLOCKS if alike else share > 0.3
    counts = torch.full((len(rows),), KEYS, dtype=torch.int32)
    monkeypatch.setattr(slots_choice, "saved_us", shares(0.87 * share))
    assert chosen(rows, counts, order) == SECOND
    monkeypatch.setattr(slots_choice, "saved_us", shares(1.15 * share))
    assert chosen(rows, counts, order) == FIRST


def test_lists_of_few_keys_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that no list has are not counted; large groups leave the way as it was."""
    rows = random_lists(3, 3)
    order = torch.arange(3, dtype=torch.int32)
    few, none = (torch.tensor(n, dtype=torch.int32) for n in ([5, 0, 1], [0, 0, 0]))
    monkeypatch.setattr(slots_choice, "saved_us", shares(0.49))
    assert chosen(rows, few, order) == SECOND
    assert chosen(rows, few, order, choice=FIRST) == FIRST
    assert chosen(rows, none, order) == FIRST


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize(("heads", "queries"), [(16, 41), (64, 10), (128, 5)])
def test_gradients_are_right_by_both_ways(
    heads: int, queries: int, slots: bool, monkeypatch: pytest.MonkeyPatch, afresh: None
) -> None:
    """Slots give the bits of `deterministic=True`, whatever the launch before left unwritten."""
    monkeypatch.setattr(slots_choice, "saved_us", lambda *_: 1.0 if slots else -1.0)
    monkeypatch.setattr(mla_bwd_choice, "slots_may_pay", lambda part: True)
    monkeypatch.setattr(Backward, "PACED_ROWS", {heads: 0})
    case = SparseMlaCase("both ways", queries, 90, heads, 24, topk_length=True, invalid=True)
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    O, lse = forward_results(inputs)
    operands = (inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
    found = []
    for deterministic in (False, True):
        with emulation(SMALL) as emulator:
            gradients = flashdsa.mla_bwd(
                *operands,
                topk_length=inputs.topk_length,
                deterministic=deterministic,
                backend="emulate-sm90",
            )
        named = dict(zip(("dQ", "dKV"), gradients, strict=True))
        assert failures(judge_backward(inputs, O, lse, named, bf16_operands=True)) == []
        assert unexpected(emulator.findings, in_order=slots or deterministic) == []
        found.append(gradients)
    assert torch.equal(found[0][1], found[1][1]) == slots


def test_ids_at_random_over_far_rows_may_take_slots() -> None:
    """Each constant counts; lists share more than they must on average, or nothing."""
    assert plan.saved_us(1e6, 9e5, 3e5) > 0
    assert plan.saved_us(3e6, 9e5, 3e5) < 0
    assert plan.saved_us(1e6, 9e5, 9e5) < 0
    assert plan.saved_us(1e5, 9e4, 3e4) < 0
    assert plan.most_rows(132, 132, 10.0, 1 << 30) == pytest.approx(1320, rel=1e-3)
    assert plan.most_rows(1320, 132, 2048.0, 4096) == pytest.approx(10 * 4096, rel=1e-3)
