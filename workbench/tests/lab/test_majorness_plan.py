"""Plans that the instructions do not take are refused with the limit and the ISA's section."""

from __future__ import annotations

import pytest

from flashdsa.errors import ArgumentValueError
from workbench.lab.kernels.majorness.plan import InstructionLimitError
from workbench.lab.kernels.majorness.sm90.plan import Sm90Plan
from workbench.lab.kernels.majorness.sm100.plan import HazardPlan, Sm100Plan

LIMITS = [
    (Sm90Plan, {"dtype": "e4m3", "b_major": "mn"}, "wgmma reads e4m3 K-major only", "imm-trans-b"),
    (Sm90Plan, {"dtype": "e5m2", "a_major": "mn"}, "K-major only", "Shared Memory Layout"),
    (Sm90Plan, {"m": 128}, "M = 64; got 128", "Matrix Shape"),
    (Sm90Plan, {"n": 260}, "N from 8 to 256 in steps of 8; got 260", "Matrix Shape"),
    (Sm90Plan, {"k": 48}, "multiple of 32; got 48", "Shared Memory Layout"),
    (Sm90Plan, {"n": 32, "b_major": "mn"}, "rows to be a multiple of 64", "Shared Memory Layout"),
    (Sm100Plan, {"m": 32}, "M = 64 or 128; got 32", "Matrix Shape"),
    (Sm100Plan, {"m": 128, "n": 72}, "from 16 to 256 in steps of 16; got 72", "Matrix Shape"),
    (Sm100Plan, {"dtype": "e5m2", "b_major": "mn", "n": 24, "swizzle": 0}, "of 16", "Transpose"),
    (HazardPlan, {"ws": True, "n": 32, "k": 64}, "N = 64, 128 or 256; got 32", "Matrix Shape"),
    (HazardPlan, {"ws": True, "m": 16, "k": 64}, "M = 32, 64 or 128; got 16", "Matrix Shape"),
]


def test_the_error_names_limit_and_section() -> None:
    for plan, options, limit, section in LIMITS:
        with pytest.raises(InstructionLimitError) as raised:
            plan(**options)
        assert limit in str(raised.value)
        assert "PTX ISA" in str(raised.value) and section in str(raised.value)


def test_other_wrong_options_are_refused() -> None:
    for options, expected in (
        ({"dtype": "fp32"}, "dtype: expected one of bf16, f16, e4m3, e5m2; got 'fp32'"),
        ({"swizzle": 16}, "swizzle: expected one of 0, 32, 64, 128; got 16"),
        ({"cut": "slice"}, "cut: expected one of tile, shape"),
        ({"k": 1024, "n": 64, "m": 128}, "393216 bytes of shared memory; a CTA has 231424"),
    ):
        with pytest.raises(ArgumentValueError, match=expected):
            Sm100Plan(**options)  # type: ignore[arg-type]


def test_a_plan_knows_its_tiles() -> None:
    plan = Sm100Plan(dtype="e4m3", b_major="mn")
    assert (plan.step_k, plan.part_k, plan.steps) == (32, 64, 2)
    assert (plan.b_offset, plan.smem_bytes) == (64 * 128, 320 * 128)
    assert Sm100Plan(n=64).swizzle_name("mn") == "MN_SW128"
    assert Sm90Plan(swizzle=0).swizzle_name("k") == "K_INTER"


def test_rows_of_d_are_in_the_lanes_of_the_isa_s_layouts() -> None:
    assert [Sm100Plan(m=64).row_of_d(row) for row in (0, 15, 16, 63)] == [0, 15, 32, 111]
    ws = HazardPlan(m=32, n=64, k=64, ws=True)  # layout G: N in quarters over groups of 32 lanes
    assert [ws.cell_of_d(31, column) for column in (0, 16, 63)] == [(31, 0), (63, 0), (127, 15)]
    ws = HazardPlan(m=64, n=256, k=64, ws=True)  # layout E: N in halves over groups of 64 lanes
    assert ws.cell_of_d(3, 128) == (67, 0)
