"""The Blackwell backward's plan: refused where it does not fit; true of the compiled kernel."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashdsa.hw import SM100
from flashdsa.kernels.attention.sm100.bwd.plan import TIMELINE, BwdPlan, Step
from flashdsa.plan import BudgetError, check_arrivals

PLAN = BwdPlan()
ALIGNMENT = 1024
"""Alignment of the plan's byte 0, which is not the first of the window of shared memory."""


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"kv_stages": 3}, "248596 bytes planned, 232448 available; partial is the first region"),
        ({"ring_slots": 4}, "ring is the first region|rows is the first region beyond"),
        ({"softmax_registers": 144}, "registers: 66560 planned, 65536 available; reduce takes"),
        ({"mma_registers": 90}, "mma has 90 a thread"),
        ({"kv_stages": 1}, "kv_stages: expected at least 2; got 1"),
    ],
)
def test_what_the_architecture_does_not_have_is_refused(
    choices: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BwdPlan(**choices)


@pytest.mark.parametrize(
    ("region", "first", "last"),
    [("ds", Step.P, Step.DQ), ("ds", Step.DKV0_S, Step.DP), ("dp", Step.DP, Step.DKV0_S)],
)
def test_ds_and_dp_share_columns_only_because_of_their_live(
    monkeypatch: pytest.MonkeyPatch, region: str, first: Step, last: Step
) -> None:
    """A step more of either, and the plan is refused."""
    columns = [
        replace(r, live=tuple(replace(live, first=first, last=last) for live in r.live))
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


def test_products_of_a_block_are_those_of_the_backward() -> None:
    """2 M N K over all MMAs of both CTAs: P, dP, dQ, dKV of 128 heads and 32 keys."""
    products = pytest.importorskip("flashdsa.kernels.attention.sm100.bwd.products")
    p = products.products_of(PLAN)
    both = [p.p, p.p_rope, p.dp, p.dq, p.dq_rope, *p.dkv[0], *p.dkv[1]]
    flops = 2 * sum(2 * one.m * one.n * one.k for one in both)
    flops += sum(2 * one.m * one.n * one.k for one in p.dkv[2])  # by one CTA
    assert flops == 2 * 128 * 32 * (576 + 512 + 576 + 512 + 576)


class Watcher:
    """What a launch was, and what its run did, in the plan's terms."""

    def __init__(self) -> None:
        self.setup: Any = None
        self.barriers: list[dict[int, int]] = []  # of each CTA: arrivals by offset
        self.registers: dict[int, set[int]] = defaultdict(set)  # that a warp sets
        self.allocations: set[tuple[int, int]] = set()  # first column, columns
        self.smem = {
            kind: np.zeros(SM100.smem_bytes + ALIGNMENT, bool) for kind in ("read", "write")
        }
        self.tmem = {kind: np.zeros(SM100.tmem_columns, bool) for kind in ("read", "write")}

    def observer(self) -> Any:
        """Listens to the run and fills this in."""
        from ptxemu.engines.mbarrier import mbarriers
        from ptxemu.engines.tmem_allocator import tmem_allocator
        from ptxemu.events import Access, Observer, Space

        watcher = self

        class Observing(Observer):
            def cta_exited(self, cta: Any) -> None:
                by_offset = mbarriers(cta).by_offset
                watcher.barriers.append({at: b.expected for at, b in by_offset.items()})

            def instruction_executed(self, agent: Any, instruction: Any, lanes: int) -> None:
                if instruction.opcode.startswith("setmaxnreg"):
                    watcher.registers[agent.index].add(instruction.operands[0].value)
                if instruction.opcode.startswith("tcgen05.ld"):
                    for start, (columns, _) in tmem_allocator(agent.cta).allocations.items():
                        watcher.allocations.add((start, columns))

            def accessed(self, access: Access) -> None:
                if access.space is Space.SHARED:
                    pieces, size = watcher.smem[access.kind.value], access.size
                    starts = access.starts
                elif access.space is Space.TMEM:
                    pieces, size = watcher.tmem[access.kind.value], -(-access.size // 4)
                    starts = access.starts % 2048 // 4
                else:
                    return
                for start in np.unique(starts):
                    pieces[start : start + size] = True

        return Observing()

    @property
    def base(self) -> int:
        """Where the plan's byte 0 lies in the window of shared memory."""
        start = min(self.barriers[0]) - PLAN.smem.offset("barriers")
        assert 0 <= start <= ALIGNMENT and start % ALIGNMENT == 0
        return start


@pytest.fixture(scope="module")
def watched() -> Watcher:
    """One query of two blocks on the emulator: either CTA owns one."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")
    import torch

    from flashdsa.backends.emulated.runner import compiled
    from flashdsa.backends.sm100.mla_bwd import run
    from flashdsa.kernels.catalog import MLA_BWD
    from flashdsa.ops.attention_backward import MlaBwdOperands
    from flashdsa.verify.judge_sparse_mla import forward_results
    from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
    from ptxemu.cutedsl import emulate

    inputs = make_sparse_mla_inputs(SparseMlaCase("two blocks", 1, 70, 128, 64), 0, "cpu")
    O, lse = forward_results(inputs)
    function = compiled(MLA_BWD, PLAN)
    watcher = Watcher()

    def launched(setup: Any) -> Any:
        if "backward_kernel" not in setup.kernel:
            return None
        watcher.setup = setup
        return watcher.observer()

    operands = MlaBwdOperands(inputs.q, inputs.kv, inputs.do, lse, O, inputs.indices)
    with emulate(arch="sm_100a", check=False, on_launch=launched):
        run(
            function, operands, sm_scale=0.04, deterministic=False, dkv_dtype=torch.float32, pairs=1
        )
    return watcher


def test_the_launch_takes_the_planned_shared_memory_and_threads(watched: Watcher) -> None:
    assert watched.setup.smem == PLAN.smem.total
    assert watched.setup.block[0] == PLAN.threads


def test_the_planned_columns_are_allocated(watched: Watcher) -> None:
    assert watched.allocations == {(0, PLAN.tmem.allocated)}


def test_barriers_lie_where_planned_with_the_counts_that_follow_from_the_roles(
    watched: Watcher,
) -> None:
    from flashdsa.dsl.memory import barrier_offset

    assert len(watched.barriers) == 2
    for found in watched.barriers:
        by_offset = {at - watched.base: arrivals for at, arrivals in found.items()}
        counts = {
            barrier.name: [
                by_offset.pop(barrier_offset(PLAN, barrier) + 8 * stage)
                for stage in range(barrier.stages)
            ]
            for barrier in PLAN.barriers
        }
        check_arrivals(PLAN.barriers, counts)
        assert not by_offset


def test_every_warp_sets_the_registers_of_its_role(watched: Watcher) -> None:
    roles = [role for role in PLAN.roles for _ in range(role.warps)]
    wanted = {warp: {role.registers} for warp, role in enumerate(roles)}
    assert watched.registers == wanted


@pytest.mark.parametrize("memory", ["smem", "tmem"])
def test_the_run_writes_and_reads_every_region_and_nothing_else(
    watched: Watcher, memory: str
) -> None:
    """Whole regions, but for rows: two blocks do not go round its stages."""
    if memory == "smem":
        touched = {kind: pieces[watched.base :] for kind, pieces in watched.smem.items()}
        places = {r.name: (PLAN.smem.offset(r.name), r.bytes) for r in PLAN.smem.regions}
    else:
        touched = watched.tmem
        places = {r.name: (r.column, r.columns) for r in PLAN.tmem.regions}
    planned = np.zeros_like(touched["write"])
    for name, (start, size) in places.items():
        planned[start : start + size] = True
        if name == "barriers":
            continue  # opaque to all but mbarrier instructions, of which init writes
        share = 0.5 if name == "rows" else 1.0
        for kind in ("read", "write"):
            assert touched[kind][start : start + size].mean() == share, (name, kind)
    for kind in ("read", "write"):
        assert not touched[kind][~planned].any()
