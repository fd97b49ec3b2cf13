"""The Hopper forward's compiled kernels on ptxemu: within the contract, without a finding."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated.devices import Device
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.sm90.sparse_mla import bind_way
from flashdsa.backends.sm90.sparse_mla_ways import Way
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan
from flashdsa.kernels.catalog import SPARSE_MLA_FWD
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_forward, judge_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from ptxemu import Policy
from tests.kernels.assembled import assert_it_assembles_without_spills, ptx_of
from tests.kernels.features import EVERY_FEATURE
from tests.support.forward_operands import forward_operands

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
    case = replace(TWO_STEPS, num_queries=5, topk=500, poison=False, invalid=False)
    one = Device(1, {1: 1})
    lists = [(500, *ends) for ends in ((500,) * 4, (10, 0, 129, 384))]
    full, short = (run(case, FwdPlan(), ends=ends, device=one).setups[0] for ends in lists)
    steps = [4 + sum(max(1, -(-end // 128)) for end in ends) for _, *ends in lists]
    assert steps == [20, 11]
    instructions = [setup.launch().warp_instructions for setup in (full, short)]
    assert 0.55 < instructions[1] / instructions[0] < 0.75


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
    run(GROUP, FwdPlan(group=4))


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
        (replace(GROUP, max_logits=False), FwdPlan(4, drawn=True)),
    ],
    ids=["1 of 512", "4 of 512", "4"],
)
def test_rows_that_are_k_and_v_alike_and_logits_that_nobody_asked_for(
    case: SparseMlaCase, plan: FwdPlan
) -> None:
    """They are not written; test_sm90_joined_emulated.py has 512 columns of both sources, too."""
    run(case, plan, Policy(asynchronous="late"))


@pytest.mark.slow
def test_queries_whose_unions_have_no_room_are_launched_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In turns; drawn items are in test_sm90_fwd_drawn.py."""
    monkeypatch.setattr("flashdsa.backends.sparse_mla_launches.MOST_UNION_BYTES", 1)
    setups = run(GROUP, FwdPlan(group=4)).setups
    assert len(setups) == 6  # of each group its union, the forward, and what mends O


def test_nothing_to_do() -> None:
    for case in (SparseMlaCase("no key", 2, 0, 64, 32), SparseMlaCase("no query", 0, 9, 64, 32)):
        inputs = make_sparse_mla_inputs(case, 0, "cpu")
        assert failures(check_forward(inputs, "emulate-sm90")) == []


@pytest.mark.slow
def test_a_missing_arrival_is_found(one_more_arrival: Callable[[str], None]) -> None:
    """The plan's counts are the kernel's: one too many, and the CTA waits for ever."""
    one_more_arrival("p1_full")
    with pytest.raises(Exception, match=r"(?i)deadlock"):
        run(SparseMlaCase("one step", 1, 50, 64, 64), FwdPlan(lazy_log2=7.0))  # compiled anew


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


@pytest.mark.parametrize(
    "plan",
    [FwdPlan(), pytest.param(FwdPlan(4, drawn=True, tile=WITHOUT_ROPE), marks=pytest.mark.slow)],
    ids=["1", "4 of 512"],
)
def test_the_newest_assembler_takes_it_and_nothing_is_spilled(plan: FwdPlan) -> None:
    """Nor does it make a wgmma wait for the one before, which it says as a warning."""
    assert_it_assembles_without_spills(SPARSE_MLA_FWD, plan)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_order_of_warps_does_not_matter() -> None:
    for seed in range(5):
        run(TWO_STEPS, FwdPlan(), Policy(seed=seed))
        run(GROUP, FwdPlan(group=4), Policy(seed=seed))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("heads", "group"), [(32, 2), (8, 8)])
def test_groups_of_two_and_of_eight(heads: int, group: int) -> None:
    run(SparseMlaCase("group", group + 1, 90, heads, 70, invalid=True), FwdPlan(group=group))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_models_sizes() -> None:
    case = SparseMlaCase("model's topk", 1, 3000, 128, 2048, invalid=True)
    run(case, FwdPlan(), Policy(asynchronous="eager"))
