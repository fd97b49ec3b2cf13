"""Items of the Hopper backward drawn by ticket, on ptxemu: more than CTAs, of any length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import flashdsa
from flashdsa.backends.emulated.devices import SMALL, Device
from flashdsa.backends.emulated.runner import emulation
from flashdsa.backends.sm90 import mla_bwd_per_item
from flashdsa.backends.sm90.mla_bwd_per_item import Call
from flashdsa.kernels.attention.sm90.bwd_per_item import tickets
from flashdsa.verify import draw_rows
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import forward_results, judge_backward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from tests.kernels.findings import unexpected

TWO_SMS = Device(2, {1: 2})
TOPK = 200
LENGTHS = [130, 0, 0, 200, 1, 65, 64, 0, 192, 128, 3]
"""Items of 0 to 4 tiles, neighbours without any among them."""


@pytest.fixture(autouse=True)
def lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries' lengths go round these."""
    monkeypatch.setattr(draw_rows, "length_values", lambda topk: LENGTHS)


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
    ("heads", "queries", "device", "short"),
    [
        (64, 7, TWO_SMS, 0),
        pytest.param(128, 5, SMALL, TOPK, marks=pytest.mark.slow),
        pytest.param(64, 11, SMALL, TOPK, marks=pytest.mark.slow),
        pytest.param(16, 30, SMALL, TOPK, marks=pytest.mark.slow),
    ],
)
def test_dq_has_the_bits_of_items_in_turns(
    heads: int, queries: int, device: Device, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without pace; with lists of a bitmap, and of a sort where they are short."""
    monkeypatch.setattr(mla_bwd_per_item, "SHORT_SLOTS", short)
    policy = Policy(asynchronous="random", seed=3)
    drawn = gradients_of(heads, queries, device, policy)[0]
    monkeypatch.setattr(mla_bwd_per_item, "PACED_ROWS", {heads: 0})
    paced = gradients_of(heads, queries, device, policy)[0]
    monkeypatch.setattr(Call, "tickets", property(lambda call: False))
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
    monkeypatch.setattr(mla_bwd_per_item, "PACED_ROWS", {heads: 0})
    monkeypatch.setattr(tickets, "MOST_POLLS", polls)
    monkeypatch.setattr(tickets, "PACE_TILES", 2)
    policy = Policy(asynchronous="random", seed=4)
    paced = gradients_of(heads, queries, TWO_SMS, policy, varied)[0]
    monkeypatch.setattr(Call, "tickets", property(lambda call: False))
    assert torch.equal(paced, gradients_of(heads, queries, TWO_SMS, Policy(), varied)[0])
