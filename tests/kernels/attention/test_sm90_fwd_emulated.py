"""The Hopper forward's compiled kernels on ptxemu: within the contract, without a finding."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.emulated.runner import EmulatedProgress, Emulator
from flashdsa.backends.sm90.sparse_mla import bind_way
from flashdsa.backends.sm90.sparse_mla_ways import Way
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan
from flashdsa.kernels.catalog import SPARSE_MLA_FWD
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_forward, judge_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, SparseMlaInputs, make_sparse_mla_inputs
from ptxemu import Policy
from tests.kernels.findings import EVERY_FEATURE
from tests.support.attention_launches import forward_operands
from tests.support.compilations import ptx_of

TWO_STEPS = SparseMlaCase(
    "two steps", 1, 90, 64, 200, duplicates=True, invalid=True, poison=True, max_logits=True
)
GROUP = SparseMlaCase(
    "a group and a half", 5, 300, 16, 70, duplicates=True, invalid=True, topk_length=True,
    attn_sink="finite", max_logits=True,
)  # fmt: skip
ALL_AT_ONCE = SparseMlaCase(
    "every feature", 3, 60, 20, 140, attn_sink="infinite", max_logits=True, **EVERY_FEATURE
)


def run(
    case: SparseMlaCase,
    plan: FwdPlan,
    policy: Policy | None = None,
    ends: tuple[int, ...] = (),
    **device: Any,
) -> Emulator:
    """The case by that plan; its results are judged, and nothing may be found.

    Args:
        ends: of the lists, from where on no slot names a row.
    """
    inputs = make_sparse_mla_inputs(case, 0, "cpu")
    for slots, end in zip(inputs.indices, ends, strict=False):
        slots[..., end:] = torch.tensor([-1, case.num_keys]).repeat(case.topk)[: case.topk - end]
    emulator = Emulator(policy=policy, on_finding="collect", **device)
    operands = forward_operands(emulator, inputs)
    scale = case.d_qk**-0.5 if case.sm_scale is None else case.sm_scale
    with emulator.launching():
        bind_way(emulator, Way(plan), operands.inputs, scale)(operands)
    assert failures(judge_forward(inputs, *operands[3:6], backend="emulate-sm90")) == []
    assert [str(finding) for finding in emulator.findings] == []
    return emulator


@pytest.mark.parametrize("when", ["eager", "late"])
def test_it_does_not_matter_when_asynchronous_work_happens(when: str) -> None:
    plan = FwdPlan()
    (setup,) = run(TWO_STEPS, plan, Policy(asynchronous=when, seed=3)).setups
    assert setup.smem == plan.smem.total
    assert (setup.grid[0], setup.block[0]) == (1, plan.threads)


def test_steps_after_the_last_slot_that_names_a_row_are_left_out() -> None:
    """A CTA has all items: those after its first one end with their lists, which may be empty."""
    case = replace(TWO_STEPS, num_queries=4, topk=300, poison=False, invalid=False)
    one = Device(1, {1: 1})
    lists = [(300, *ends) for ends in ((300,) * 3, (10, 0, 129))]
    told: list[list[EmulatedProgress]] = [[], []]
    for ends, reports in zip(lists, told, strict=True):
        run(case, FwdPlan(), ends=ends, device=one, on_progress=reports.append)
    steps = [3 + sum(max(1, -(-end // 128)) for end in ends) for _, *ends in lists]
    assert steps == [12, 7]
    full, short = (reports[-1].warp_instructions for reports in told)
    assert 0.55 < short / full < 0.75


def test_every_feature() -> None:
    """Lengths, sinks, gaps, a number of heads that is no tile's; queries without a valid slot."""
    run(ALL_AT_ONCE, FwdPlan())


@pytest.mark.parametrize("scale", [0.0, -0.05])
def test_any_finite_scale(scale: float) -> None:
    run(
        SparseMlaCase("scale", 1, 50, 8, 64, sm_scale=scale, invalid=True, max_logits=True),
        FwdPlan(),
    )


def test_finite_inputs_do_not_overflow_however_large_the_logits() -> None:
    run(SparseMlaCase("huge", 1, 50, 8, 130, logit_scale=1e30, max_logits=True), FwdPlan())


def test_a_group_of_queries_over_the_union_of_their_rows() -> None:
    """Five queries of 16 heads: a whole group, and one that has one query; a row that a query names
    again counts again."""
    run(GROUP, FwdPlan(4, drawn=True))


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        pytest.param(
            replace(TWO_STEPS, d_qk=512), FwdPlan(tile=WITHOUT_ROPE), marks=pytest.mark.slow
        ),
        pytest.param(
            replace(GROUP, d_qk=512, max_logits=False),
            FwdPlan(4, drawn=True, tile=WITHOUT_ROPE),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["1 of 512", "4 of 512"],
)
def test_rows_that_are_k_and_v_alike_and_logits_that_nobody_asked_for(
    case: SparseMlaCase, plan: FwdPlan
) -> None:
    """They are not written; test_sm90_joined_emulated.py has 512 columns of both sources, too, and
    test_sm90_fwd_drawn.py such logits."""
    run(case, plan, Policy(asynchronous="late"))


def test_nothing_to_do() -> None:
    for case in (SparseMlaCase("no key", 2, 0, 64, 32), SparseMlaCase("no query", 0, 9, 64, 32)):
        inputs = make_sparse_mla_inputs(case, 0, "cpu")
        assert failures(check_forward(inputs, "emulate-sm90")) == []


def test_the_instructions_that_make_it_this_kernel() -> None:
    text = ptx_of(SPARSE_MLA_FWD, FwdPlan())
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+)k16", text)
    # S is issued in three places, twice for tile 0; P V in four, four steps of 16 keys each.
    assert products.count("m64n64") == 3 * 36
    assert products.count("m64n256") == 4 * 4
    assert "cp.async.cg.shared.global" in text and "cp.async.mbarrier.arrive.noinc" in text
    assert not re.search(r"\b(red|atom)\.\S*global", text)
    registers = {int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", text)}
    assert registers == {role.registers for role in FwdPlan().roles}


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
    reports: list[EmulatedProgress] = []
    policy = Policy(asynchronous=when)
    options = {"on_finding": "collect", "on_progress": reports.append}
    emulator = Emulator(device, policy=policy, **options)
    operands = forward_operands(emulator, inputs)
    with emulator.launching():
        bind_way(emulator, Way(plan), operands.inputs, case.d_qk**-0.5)(operands)
    assert failures(judge_forward(inputs, *operands[3:6], backend="emulate-sm90")) == []
    assert [str(finding) for finding in emulator.findings] == []
    return operands.out, operands.lse, reports[-1].warp_instructions


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
    share = (sum(steps) + len(steps)) / (5 * 2)
    full = make_sparse_mla_inputs(replace(case, num_queries=2), 0, "cpu")
    assert taken < 1.2 * share * call(plan, full, ONE_CTA)[2]


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
