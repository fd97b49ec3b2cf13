"""The Blackwell backward's plan: what fits, what follows from the roles, what is refused."""

from __future__ import annotations

import pytest

from flashdsa.hw import SM100
from flashdsa.kernels.attention.sm100.bwd.plan import BwdPlan
from flashdsa.kernels.attention.sm100.bwd.products import products_of
from flashdsa.plan import (
    BudgetError,
    LiveRange,
    Role,
    SmemRegion,
    TmemRegion,
    check_registers,
    plan_smem,
    plan_tmem,
)

PLAN = BwdPlan()


def test_every_budget_is_kept() -> None:
    assert PLAN.smem.total <= SM100.smem_bytes
    assert PLAN.tmem.allocated == SM100.tmem_columns
    assert sum(role.threads * role.registers for role in PLAN.roles) == SM100.registers
    assert PLAN.tmem.column("ds") == PLAN.tmem.column("dp")


def test_arrivals_follow_from_the_roles() -> None:
    arrivals = {barrier.name: barrier.arrivals for barrier in PLAN.barriers}
    assert (arrivals["kv_full"], arrivals["p_ready"]) == (1, 1)
    assert (arrivals["s_ready"], arrivals["partial_free"], arrivals["dkv_free"]) == (128, 128, 128)
    assert (arrivals["rows_full"], arrivals["rows_free"]) == (32, 8)


def test_barriers_lie_in_their_region_one_behind_the_other() -> None:
    memory = pytest.importorskip("flashdsa.dsl.memory", reason="needs CuTe DSL")
    start = PLAN.smem.offset("barriers")
    offsets = [
        memory.barrier_offset(PLAN, barrier) + 8 * stage
        for barrier in PLAN.barriers
        for stage in range(barrier.stages)
    ]
    assert offsets == list(range(start, start + PLAN.smem.size("barriers"), 8))


def test_a_third_stage_of_keys_does_not_fit_and_the_region_is_named() -> None:
    with pytest.raises(BudgetError, match="partial is the first region beyond"):
        BwdPlan(kv_stages=3)


def test_too_many_registers_name_the_role() -> None:
    with pytest.raises(BudgetError, match="reduce takes most"):
        BwdPlan(softmax_registers=144)
    with pytest.raises(BudgetError, match="mma has 90 a thread"):
        BwdPlan(mma_registers=90)


def test_regions_that_share_memory_may_not_live_at_the_same_time() -> None:
    loop, end, late = (LiveRange(0, 2, ""),), (LiveRange(3, 3, ""),), (LiveRange(2, 3, ""),)
    q, behind = (
        SmemRegion("q", 64, 16, "", live=loop),
        SmemRegion("behind", 16, 16, "", live=loop),
    )
    plan = plan_smem([q, SmemRegion("dq", 96, 16, "", "q", end), behind], 112)
    assert (plan.offset("dq"), plan.offset("behind"), plan.total) == (0, 96, 112)
    with pytest.raises(BudgetError, match=r"q \[0, 64\) and dq \[0, 96\) overlap and are live"):
        plan_smem([q, SmemRegion("dq", 96, 16, "", "q", late)], 112)
    dp, ds = TmemRegion("dp", 0, 32, "", loop), TmemRegion("ds", 0, 16, "", late)
    with pytest.raises(BudgetError, match=r"dp \[0, 32\) and ds \[0, 16\) overlap and are live"):
        plan_tmem([dp, ds], 512)
    with pytest.raises(BudgetError, match=r"dp .* ends behind the 16 columns"):
        plan_tmem([dp], 16)


def test_registers_come_in_steps_of_eight() -> None:
    with pytest.raises(BudgetError, match="multiples of 8"):
        check_registers([Role("r", 128, 100, "")], 65_536)


def test_products_of_a_block_are_those_of_the_backward() -> None:
    """2 M N K over all MMAs of both CTAs: P, dP, dQ, dKV of 128 heads and 32 keys."""
    p = products_of(PLAN)
    both = [p.p, p.p_rope, p.dp, p.dq, p.dq_rope, *p.dkv[0], *p.dkv[1]]
    flops = 2 * sum(2 * one.m * one.n * one.k for one in both)
    flops += sum(2 * one.m * one.n * one.k for one in p.dkv[2])  # by one CTA
    assert flops == 2 * 128 * 32 * (576 + 512 + 576 + 512 + 576)
    assert {one.cta_group for one in (*both, *p.dkv[2])} == {1}
    assert [one.a_in_tmem for one in both] == [False, False, True, True, True] + [False] * 4
