"""Reports of small kernels whose need of registers is known, on both architectures."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from flashdsa.kernels.catalog import KERNELS
from flashdsa.plan.kernel_spec import find_kernel
from flashdsa.toolchain import Assembler, Disassembler
from workbench.analysis.inspect import inspect_ptx, inspect_variant
from workbench.analysis.report import Grade, KernelReport, RoleReport, Room, advise
from workbench.tests.analysis.ptx_texts import roles_of, sums_of

ADDRESSES = 8
"""Registers that the loop counter and the addresses may take on top of the values."""


@pytest.fixture(autouse=True)
def tools(assembler: Assembler, disassembler: Disassembler) -> None:
    """Both are needed, or the test is skipped."""


@cache
def only(ptx: str, arch: str) -> KernelReport:
    """The report of a module's only kernel; most of a second goes to the disassembler."""
    (report,) = inspect_ptx(ptx, arch)
    return report


def role(report: KernelReport, start: str) -> RoleReport:
    """The role whose name starts so."""
    (found,) = [one for one in report.roles if one.name.startswith(start)]
    return found


@pytest.mark.parametrize(("count", "arch"), [(100, "sm_90a"), (40, "sm_100a")])
def test_live_registers_are_the_values_and_their_addresses(count: int, arch: str) -> None:
    report = only(sums_of(count, arch), arch)
    (whole,) = report.roles
    assert (report.arch, report.threads, whole.threads) == (arch, 128, 128)
    assert count <= whole.live <= count + ADDRESSES
    assert whole.live <= whole.named <= report.registers
    assert whole.grade is Grade.OK
    assert (report.local_stores, report.spill_stores, report.stack_bytes) == (0, 0, 0)
    assert report.mix["floating point"] >= count


def test_a_kernel_without_room_spills() -> None:
    report = only(sums_of(100, directive=".reqntid 128 .maxnreg 64"), "sm_90a")
    (whole,) = report.roles
    assert report.grade is whole.grade is Grade.SPILLS
    assert (report.registers, report.register_limit, whole.budget) == (64, 64, 64)
    assert report.spill_stores and report.spill_loads
    assert 100 - 64 < report.stack_bytes / 4 < 100
    assert whole.local_stores == report.mix["local memory"] - whole.local_loads > 0
    assert f"{-(-report.stack_bytes // 4)} values of a thread lie in local memory" in whole.advice


def test_roles_are_held_against_their_setmaxnreg() -> None:
    report = only(roles_of(150, 216, target="sm_100a"), "sm_100a")
    assert (report.registers, report.register_limit, report.threads) == (128, 128, 512)
    large, small = role(report, "setmaxnreg 216"), role(report, "setmaxnreg 24")
    assert (large.budget, large.budget_from) == (216, "setmaxnreg")
    assert 150 <= large.live <= 150 + ADDRESSES
    assert small.live < ADDRESSES
    assert role(report, "before").budget == 128
    assert "setmaxnreg 176 would do" in large.advice
    assert report.grade is Grade.OK


def test_changes_are_listed_by_their_effect() -> None:
    """A role of 96 registers among others that have room, as the plan would say."""
    holders = [("needed", "tmem.py:80", 56), ("made", "memory.py:33", 20)]
    room = Room(free=128 * 16, spare={"load": 35, "mma": 7}, threads=128, by_setmaxnreg=True)
    text = advise(Grade.SPILLS, 90, 96, stack_bytes=16, holders=holders, room=room)
    need, _, listed = text.partition("; what helps, by its effect: ")
    assert need == "4 values of a thread lie in local memory"
    assert listed.split("; ") == [
        "make the 56 values that tmem.py:80 needs just before it (about 56)",
        "take 32 registers from load, which has 35 left (about 32)",
        "raise setmaxnreg to 112, which the CTA has free (about 16)",
        "a tile half as large at memory.py:33, which makes 20 (about 10)",
    ]
    nothing = Room(free=None, spare={}, threads=None, by_setmaxnreg=False)
    text = advise(Grade.SPILLS, 90, 96, stack_bytes=0, holders=[], room=nothing)
    assert text.startswith("local memory is used: hold less at once (smaller tile")


@pytest.mark.slow
def test_a_plan_of_ours_that_spills_is_told_its_budget() -> None:
    """The Blackwell backward with 80 of the 184 registers that its reductions have."""
    pytest.importorskip("cutlass")
    kernel = find_kernel(KERNELS, "mla_bwd", "sm_100a")
    spilling = kernel._replace(plan=replace(kernel.plan, reduce_registers=80))  # type: ignore[type-var]
    report = max(inspect_variant(spilling), key=lambda one: one.code_bytes)
    reduce = role(report, "reduce")
    assert reduce.grade is Grade.SPILLS and reduce.local_loads
    assert "by its effect: raise setmaxnreg to 184, which the CTA has free" in reduce.advice
    assert {one.grade for one in report.roles if one is not reduce} == {Grade.OK}


def test_only_the_role_without_room_spills() -> None:
    report = only(roles_of(150, 136), "sm_90a")
    assert role(report, "setmaxnreg 136").grade is Grade.SPILLS
    assert role(report, "setmaxnreg 24").grade is Grade.OK
    assert role(report, "setmaxnreg 24").local_stores == 0


def test_a_role_with_hardly_any_room_is_tight() -> None:
    report = only(roles_of(150, 160), "sm_90a")
    large = role(report, "setmaxnreg 160")
    assert large.grade is report.grade is Grade.TIGHT
    assert f"{160 - large.live} left" in large.advice


def test_lines_of_ptx_without_loc_are_its_own() -> None:
    ptx = sums_of(100, "sm_90a")
    report = only(ptx, "sm_90a")
    assert report.lines == "PTX"
    texts = ptx.splitlines()
    for holder in report.roles[0].peak.holders:
        assert any(word in texts[holder.line - 1] for word in ("fma", "ld.", "mov", "mul", "add"))


def test_what_a_called_function_holds_counts_at_the_call() -> None:
    division = "div.rn.f32 %f0, %f1, %f2;"
    ptx = sums_of(40).replace("add.u32 %r2", division + "\nadd.u32 %r2")
    report = only(ptx, "sm_90a")
    assert report.mix["control flow"] > 3
    assert any("called function" in note for note in report.notes)
    (whole,) = report.roles
    assert 40 <= whole.live <= whole.named <= report.registers
