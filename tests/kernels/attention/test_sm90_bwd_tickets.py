"""Items of the Hopper backward drawn by ticket, on ptxemu: more than CTAs, of any length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

import flashdsa
from flashdsa.backends.emulated.devices import SMALL, Device
from flashdsa.backends.emulated.runner import emulation
from flashdsa.backends.sm90 import mla_bwd
from flashdsa.heuristics.h200 import Backward
from flashdsa.kernels.attention.sm90.bwd_per_item import tickets
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import DRAWN, MET, ORDER
from flashdsa.kernels.attention.sm90.bwd_per_item.tickets import (
    FREE,
    LENGTHS,
    TAIL,
    Items,
    order_items,
)
from flashdsa.verify import draw_rows
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import forward_results, judge_backward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from ptxemu.cutedsl import emulate
from tests.kernels.findings import unexpected
from tests.support.backward_parts import without_tickets

TWO_SMS = Device(2, {1: 2})
TOPK, TILE = 200, 64
ITEM_LENGTHS = [130, 0, 0, 200, 1, 65, 64, 0, 192, 128, 3]
"""Items of 0 to 4 tiles, neighbours without any among them."""


@pytest.fixture(autouse=True)
def lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries' lengths go round these."""
    monkeypatch.setattr(draw_rows, "length_values", lambda topk: ITEM_LENGTHS)


def gradients_of(
    heads: int, queries: int, device: Device, policy: Policy, varied: bool = True
) -> tuple[Tensor, ...]:
    """dQ and dKV, within the contract; ptxemu finds nothing."""
    case = SparseMlaCase("tickets", queries, 260, heads, TOPK, topk_length=varied, poison=True)
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    O, lse = forward_results(inputs)
    with emulation(device, policy=policy) as emulator:
        gradients = flashdsa.mla_bwd(
            *(inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices),
            topk_length=inputs.topk_length,
            backend="emulate-sm90",
        )
    named = dict(zip(("dQ", "dKV"), gradients, strict=True))
    assert failures(judge_backward(inputs, O, lse, named, bf16_operands=True)) == []
    assert unexpected(emulator.findings) == []
    return gradients


@pytest.mark.parametrize(
    ("heads", "queries", "device"),
    [
        pytest.param(64, 7, TWO_SMS, marks=pytest.mark.slow),
        pytest.param(128, 5, SMALL, marks=pytest.mark.slow),
        pytest.param(64, 11, SMALL, marks=pytest.mark.slow),
        pytest.param(16, 30, SMALL, marks=pytest.mark.slow),
    ],
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "queries", "varied", "polls"),
    [
        (64, 7, False, 512),
        (64, 7, False, 1),  # all waits are too long
        (128, 5, True, 512),
        (16, 30, False, 512),
    ],
)
def test_dq_has_the_bits_of_items_in_turns_where_ctas_meet_often(
    heads: int,
    queries: int,
    varied: bool,
    polls: int,
    monkeypatch: pytest.MonkeyPatch,
    afresh: None,
) -> None:
    monkeypatch.setattr(Backward, "PACED_ROWS", {heads: 0})
    monkeypatch.setattr(tickets, "MOST_POLLS", polls)
    monkeypatch.setattr(tickets, "PACE_TILES", 2)
    policy = Policy(asynchronous="random", seed=4)
    paced = gradients_of(heads, queries, TWO_SMS, policy, varied)[0]
    monkeypatch.setattr(mla_bwd, "choose", without_tickets)
    assert torch.equal(paced, gradients_of(heads, queries, TWO_SMS, Policy(), varied)[0])


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
