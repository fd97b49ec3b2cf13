"""Lists of the Hopper forward of which many slots name no row: they take the steps that their rows
need, and give the bits of a list without such slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.sm90.sparse_mla import bind_way
from flashdsa.backends.sm90.sparse_mla_ways import Way
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import judge_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs
from ptxemu import Policy
from tests.support.forward_operands import forward_operands

KEYS = 900
MANY, FEW, NONE, ONE, LAST = 0.6, 0.1, 0.0, -1.0, -2.0
"""Shares of a list's slots that name a row; no more than one, and that is the last."""
SHARES = (MANY, FEW, 1.0, NONE, ONE, LAST)
CASE = SparseMlaCase("packed", len(SHARES), KEYS, 64, 500, max_logits=True)
ONE_CTA, TWO = Device(1, {1: 1}), Device(2, {1: 2})


def with_gaps(inputs: SparseMlaInputs, shares: tuple[float, ...] = SHARES) -> None:
    """Let each query's slots name rows in that share, and -1 and rows that do not exist else."""
    draw = torch.Generator().manual_seed(1)
    nothing = torch.tensor([-1, KEYS, -(1 << 31), (1 << 31) - 1], dtype=torch.int32)
    for slots, share in zip(inputs.indices.flatten(0, -2), shares, strict=True):
        gaps = torch.rand(len(slots), generator=draw) >= share
        if share == ONE:
            gaps[40] = False
        if share == LAST:
            gaps[-1] = False
        slots[gaps] = nothing.repeat(len(slots))[: int(gaps.sum())]


def without_gaps(indices: Tensor) -> Tensor:
    """The same lists, their rows first."""
    gaps = (indices < 0) | (indices >= KEYS)
    order = gaps.int().argsort(dim=-1, stable=True)
    packed = torch.where(gaps, -1, indices).gather(-1, order)
    return packed.contiguous()


def call(
    plan: FwdPlan, inputs: SparseMlaInputs, device: Device, when: str = "late"
) -> tuple[Tensor, Tensor, int]:
    """O, lse, and instructions; results are judged, and nothing may be found."""
    case = inputs.case
    emulator = Emulator(device, policy=Policy(asynchronous=when), on_finding="collect")
    operands = forward_operands(emulator, inputs)
    with emulator.launching():
        bind_way(emulator, Way(plan), operands.inputs, case.d_qk**-0.5)(operands)
    assert failures(judge_forward(inputs, *operands[3:6], backend="emulate-sm90")) == []
    assert [str(finding) for finding in emulator.findings] == []
    (setup,) = emulator.setups
    return operands.out, operands.lse, setup.launch().warp_instructions


@pytest.mark.parametrize(
    ("drawn", "heads"), [(True, 64), pytest.param(False, 70, marks=pytest.mark.slow)]
)
def test_lists_with_gaps_give_the_bits_of_lists_without(drawn: bool, heads: int) -> None:
    """Two items a query with 70 heads, the second of which has six rows of O."""
    case = replace(CASE, num_heads=heads)
    plan = FwdPlan(drawn=drawn)
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    with_gaps(inputs)
    out, lse, taken = call(plan, inputs, ONE_CTA)
    inputs.indices.copy_(without_gaps(inputs.indices))
    same_out, same_lse, _ = call(plan, inputs, TWO, "eager")
    assert torch.equal(out, same_out)
    assert torch.equal(lse, same_lse)
    steps = [3, 1, 4, 1, 1, 1]
    if drawn:  # the next item is drawn in the step before the last
        steps = [max(2, number) for number in steps]
    # An item takes about a step's instructions besides.
    share = (sum(steps) + len(steps)) / (5 * len(steps))
    assert taken < 1.2 * share * call(plan, make_sparse_mla_inputs(case, 0, "cpu"), ONE_CTA)[2]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["eager", "late"])
def test_lengths_end_lists_with_gaps(when: str) -> None:
    inputs = make_sparse_mla_inputs(
        replace(CASE, topk_length=True, attn_sink="finite", poison=True), 0, "cpu"
    )
    with_gaps(inputs)
    call(FwdPlan(drawn=True), inputs, TWO, when)


@pytest.mark.parametrize("drawn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_follows_the_last_row_changes_no_bit(drawn: bool) -> None:
    """Lists of one step, of which nothing is packed, too."""
    shares = (MANY, FEW, ONE, 0.95, MANY)
    short = replace(CASE, num_queries=len(shares), topk=250, num_heads=8)
    inputs = make_sparse_mla_inputs(short, 0, "cpu")
    with_gaps(inputs, shares)
    inputs.indices[-1, 128:] = -1
    plan = FwdPlan(drawn=drawn)
    out, lse, _ = call(plan, inputs, ONE_CTA)
    more = torch.nn.functional.pad(inputs.indices, (0, 2000), value=-1)
    padded = replace(inputs, case=replace(short, topk=2250), indices=more)
    same_out, same_lse, _ = call(plan, padded, TWO, "eager")
    assert torch.equal(out, same_out)
    assert torch.equal(lse, same_lse)


def test_long_lists_are_packed_where_rows_of_out_have_room() -> None:
    """A head's row of O has room for 256 ids."""
    plan = FwdPlan(drawn=True)
    taken = []
    for heads, topk in ((8, 2100), (1, 2100), (1, 600)):
        case = replace(CASE, num_queries=1, num_heads=heads, topk=topk, duplicates=True)
        inputs = make_sparse_mla_inputs(case, 0, "cpu")
        with_gaps(inputs, (0.3,))
        taken.append(call(plan, inputs, ONE_CTA)[2])
    assert taken[0] < 0.5 * taken[1]
    assert taken[2] < 0.65 * taken[0]
