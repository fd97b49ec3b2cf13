"""The Blackwell backward's plan: refused where it does not fit, and what the compiled kernel does."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashdsa.hw import SM100
from flashdsa.kernels.sparse_mla.sm100.bwd import first_design
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import BwdPlan, Draft, Step
from flashdsa.kernels.sparse_mla.sm100.bwd.timeline import TIMELINE
from flashdsa.plan import BudgetError, check_arrivals, lay_out

PLAN = BwdPlan()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"keys": 64}, r"shared memory: 300276 bytes planned, 232448 available; s is the first"),
        ({"kv_stages": 3}, r"248\d{3} bytes planned.*; rows is the first|; ring is the first"),
        ({"ring_slots": 4}, "is the first region beyond"),
        ({"softmax_registers": 184}, "registers: 66560 planned, 65536 available; softmax takes"),
        ({"mma_registers": 90}, "mma has 90 a thread"),
        ({"keys": 16}, "B_TOPK=32 keys; got 16"),
        ({"kv_stages": 1}, "kv_stages: expected at least 2; got 1"),
    ],
)
def test_what_the_architecture_does_not_have_is_refused(
    choices: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BwdPlan(**choices)


def test_64_keys_fit_neither_memory() -> None:
    draft = Draft(keys=64)
    assert lay_out(draft.regions)[1] > SM100.smem_bytes
    with pytest.raises(BudgetError, match=r"do \[480, 608\) ends behind the 512 columns"):
        _ = draft.tmem


@pytest.mark.parametrize(
    ("region", "first", "last"),
    [("ds", Step.P, Step.DQ), ("ds", Step.DKV0_S, Step.DP), ("dp", Step.DP, Step.DKV0_S)],
)
def test_ds_and_dp_share_columns_only_because_of_their_turns(
    monkeypatch: pytest.MonkeyPatch, region: str, first: Step, last: Step
) -> None:
    """A step more of either, and the plan is refused."""
    columns = [
        replace(r, turns=tuple(replace(turn, first=first, last=last) for turn in r.turns))
        if r.name == region
        else r
        for r in PLAN.columns
    ]
    monkeypatch.setattr(BwdPlan, "columns", property(lambda _: columns))
    with pytest.raises(BudgetError, match=r"dp .*and ds .*live at the same time"):
        BwdPlan(index_stages=5)  # not one whose memory is laid out already


def test_the_timeline_has_every_step_once() -> None:
    assert [row.step for row in TIMELINE] == list(Step)
    assert len({row.name for row in TIMELINE}) == len(TIMELINE)


def test_the_first_designs_figures_add_up_and_name_regions_of_this_plan() -> None:
    size = {row.name: row.size for row in first_design.SMEM}
    union = size.pop("kv") + size.pop("kv_peer") + size.pop("q_nope") + size.pop("q_rope")
    assert max(union, size.pop("dq (union)")) + sum(size.values()) == first_design.SMEM_TOTAL
    own = [row for row in first_design.TMEM if "(on" not in row.name]
    named = [(row.at, row.at + row.size) for row in own if row.name != "dKV_RoPE"]
    assert sum(stop - start for start, stop in named) == first_design.TMEM_COLUMNS
    for rows, plan in ((first_design.SMEM, PLAN.smem), (first_design.TMEM, PLAN.tmem)):
        stand_ins = {name for row in rows for name in row.here}
        assert stand_ins == {region.name for region in plan.regions}


@pytest.fixture(scope="module")
def watched() -> Watcher:
    """One query of two blocks on the emulator."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")
    import torch

    from flashdsa.backends.sm100.sparse_mla import run
    from flashdsa.verify.cases import SparseMlaCase, make_sparse_mla_inputs
    from flashdsa.verify.emulated_backward import ARCH, compiled
    from flashdsa.verify.judge_sparse_mla import forward_results
    from ptxemu.cutedsl import emulate

    inputs = make_sparse_mla_inputs(SparseMlaCase("two blocks", 1, 70, 128, 64), 0, "cpu")
    O, lse = forward_results(inputs)
    function = compiled(PLAN)
    watcher = make_watcher()
    with emulate(arch=ARCH, on_launch=watcher.launched):
        run(
            function, (inputs.q, inputs.kv, inputs.do, lse, O), inputs.indices,
            sm_scale=0.04, topk_length=None, attn_sink=None, deterministic=False,
            dkv_dtype=torch.float32,
        )  # fmt: skip
    return watcher


Watcher = Any


def make_watcher() -> Watcher:
    """An observer that keeps what the plan speaks of."""
    from ptxemu.engines.mbarrier import mbarriers
    from ptxemu.events import Access, Observer, Space

    class Watch(Observer):
        def __init__(self) -> None:
            self.setup: Any = None
            self.barriers: list[dict[int, int]] = []
            self.registers: dict[int, set[int]] = defaultdict(set)
            self.allocated: set[str] = set()
            self.touched = {
                Space.SHARED: np.zeros(SM100.smem_bytes, bool),
                Space.TMEM: np.zeros(SM100.tmem_columns, bool),
            }

        def launched(self, setup: Any) -> Observer | None:
            if "backward_kernel" not in setup.kernel:
                return None
            self.setup = setup
            return self

        def cta_exited(self, cta: Any) -> None:
            by_offset = mbarriers(cta).by_offset
            self.barriers.append({at: barrier.expected for at, barrier in by_offset.items()})

        def instruction_executed(self, agent: Any, instruction: Any, lanes: int) -> None:
            text = str(instruction)
            if "setmaxnreg" in text:
                self.registers[agent.warp_id].add(int(re.findall(r"(\d+)\D*$", text)[0]))

        def accessed(self, access: Access) -> None:
            if access.space is Space.SHARED:
                starts = access.starts
            elif access.space is Space.TMEM:
                starts = access.starts % 2048 // 4
            else:
                return
            size = access.size if access.space is Space.SHARED else access.size // 4
            for start in np.unique(starts):
                self.touched[access.space][start : start + size] = True

    return Watch()


def test_the_launch_takes_the_planned_shared_memory_and_threads(watched: Watcher) -> None:
    assert watched.setup.smem == PLAN.smem.total
    assert watched.setup.block[0] == PLAN.threads


def test_barriers_lie_where_planned_with_the_counts_that_follow_from_the_roles(
    watched: Watcher,
) -> None:
    assert len(watched.barriers) == 2
    for by_offset in watched.barriers:
        counts = {
            barrier.name: [
                by_offset.pop(PLAN.barrier_offset(barrier.name) + 8 * stage)
                for stage in range(barrier.stages)
            ]
            for barrier in PLAN.barriers
        }
        check_arrivals(PLAN.barriers, counts)
        assert not by_offset
