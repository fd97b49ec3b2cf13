"""Items of the Hopper backward drawn by ticket, and the choice of slots for dKV, on ptxemu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from flashdsa.backends.emulated.devices import SMALL, Device
from flashdsa.backends.sm90 import mla_bwd, mla_bwd_choice
from flashdsa.heuristics.h200 import Backward
from flashdsa.kernels.attention.choice import FIRST, SECOND
from flashdsa.kernels.attention.lists import Lists
from flashdsa.kernels.attention.sm90.bwd_per_item import plan, slots_choice
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import DRAWN, MET, ORDER, WAY
from flashdsa.kernels.attention.sm90.bwd_per_item.tickets import (
    FREE,
    LENGTHS,
    TAIL,
    Items,
    order_items,
)
from flashdsa.verify import draw_rows
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from ptxemu.cutedsl import emulate
from tests.kernels.attention.hopper_gradients import hopper_gradients
from tests.support.attention_launches import without_tickets

TWO_SMS = Device(2, {1: 2})
TOPK, TILE = 200, 64
ITEM_LENGTHS = [130, 0, 0, 200, 1, 65, 64, 0, 192, 128, 3]
"""Items of 0 to 4 tiles, neighbours without any among them."""


@pytest.fixture
def item_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries' lengths go round these."""
    monkeypatch.setattr(draw_rows, "length_values", lambda topk: ITEM_LENGTHS)


def gradients_of(heads: int, queries: int, device: Device, policy: Policy) -> tuple[Tensor, ...]:
    """dQ and dKV."""
    case = SparseMlaCase("tickets", queries, 260, heads, TOPK, topk_length=True, poison=True)
    return hopper_gradients(make_sparse_mla_inputs(case, 0, "cpu"), device, policy)


@pytest.mark.slow
@pytest.mark.usefixtures("item_lengths")
@pytest.mark.parametrize(
    ("heads", "queries", "device"),
    [(64, 7, TWO_SMS), (128, 5, SMALL), (64, 11, SMALL), (16, 30, SMALL)],
)
def test_dq_has_the_bits_of_items_in_turns(
    heads: int, queries: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without pace."""
    policy = Policy(asynchronous="random", seed=3)
    drawn = gradients_of(heads, queries, device, policy)[0]
    monkeypatch.setattr(Backward, "PACED_ROWS", {heads: 0})
    paced = gradients_of(heads, queries, device, policy)[0]
    monkeypatch.setattr(mla_bwd, "choose", without_tickets)
    in_turns = gradients_of(heads, queries, device, Policy())[0]
    assert torch.equal(drawn, in_turns) and torch.equal(paced, in_turns)


ORDER_THREADS = 64


@cute.kernel
def order_kernel(
    tickets: cute.Tensor,
    counts: cute.Tensor,
    shared: tuple[cute.Tensor, cute.Tensor],
    varied: Int32,
    far: Int32,
):
    items = Items(counts, shared, Float32(0.5), Boolean(varied != 0), Boolean(far != 0))
    order_items(tickets, items, TILE, ORDER_THREADS)


@cute.jit
def order(
    tickets: cute.Tensor,
    counts: cute.Tensor,
    shared: tuple[cute.Tensor, cute.Tensor],
    varied: Int32,
    far: Int32,
):
    launched = order_kernel(tickets, counts, shared, varied, far)
    launched.launch(grid=[1, 1, 1], block=[ORDER_THREADS, 1, 1])


@pytest.mark.parametrize(
    ("groups", "varied", "near", "far"),
    [(1, 0, 0, 0), (90, 0, 0, 1), (90, 1, 0, 0), (400, 1, 1, 0), (400, 1, 0, 1)],
)
def test_items_are_ordered_by_length_unless_neighbours_share(
    groups: int, varied: int, near: int, far: int
) -> None:
    counts = torch.randint(5 * TILE, (groups,), generator=torch.Generator().manual_seed(1)).int()
    counts[groups // 2] = 2 * LENGTHS * TILE
    tickets = torch.full((ORDER + groups,), -7, dtype=torch.int32)
    # The share of a union is near at 0.5 or less.
    named = torch.full((9,), 100, dtype=torch.int32)
    shared = torch.full((9,), 50 if near else 51, dtype=torch.int32), named
    with emulate() as emulator:
        operands = from_dlpack(tickets), from_dlpack(counts), tuple(map(from_dlpack, shared))
        order(*operands, varied, far)
    assert list(emulator.findings) == []
    assert tickets[DRAWN] == 0
    by_length = varied and not near
    assert tickets[MET] == (0 if far and (by_length or not varied) else FREE)
    got = tickets[ORDER:].tolist()
    assert sorted(got) == list(range(groups))
    if by_length:
        tiles = (-(counts // -TILE)).clamp(max=LENGTHS - 1)[got]
        assert (tiles[1:] <= tiles[:-1]).all()
    else:
        first = max(0, groups - TAIL)
        tail = sorted(range(first, groups), key=lambda group: (-int(counts[group]), group))
        assert got == [*range(first), *tail]


NUM_KEYS, KEYS, WAVE, BLOCKS = 5000, 300, 7, 2


@cute.jit
def choose(
    lists: tuple[cute.Tensor, cute.Tensor, cute.Tensor], tickets: cute.Tensor, choice: cute.Tensor
):
    asked = slots_choice.Asked(Lists(*lists), tickets, Int32(NUM_KEYS), Int32(WAVE), Int32(BLOCKS))
    made = slots_choice.slots_choice_kernel(asked, choice)
    made.launch(grid=[slots_choice.SAMPLES, 1, 1], block=[slots_choice.THREADS, 1, 1])


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_choice, "SAMPLES", 24)


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


@pytest.mark.usefixtures("few_samples")
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


@pytest.mark.usefixtures("few_samples")
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
    found = [
        hopper_gradients(inputs, deterministic=deterministic, in_order=slots)
        for deterministic in (False, True)
    ]
    assert torch.equal(found[0][1], found[1][1]) == slots


def test_ids_at_random_over_far_rows_may_take_slots() -> None:
    """Each constant counts; lists share more than they must on average, or nothing."""
    assert plan.saved_us(1e6, 9e5, 3e5) > 0
    assert plan.saved_us(3e6, 9e5, 3e5) < 0
    assert plan.saved_us(1e6, 9e5, 9e5) < 0
    assert plan.saved_us(1e5, 9e4, 3e4) < 0
    assert plan.most_rows(132, 132, 10.0, 1 << 30) == pytest.approx(1320, rel=1e-3)
    assert plan.most_rows(1320, 132, 2048.0, 4096) == pytest.approx(10 * 4096, rel=1e-3)
