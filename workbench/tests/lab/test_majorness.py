"""The majorness study on the emulator: its numbers, every form, and what can go wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from flashdsa.errors import ArgumentValueError
from workbench.lab.kernels.majorness.plan import InstructionLimitError
from workbench.lab.kernels.majorness.sm90.plan import Sm90Plan
from workbench.lab.kernels.majorness.sm100.plan import HazardPlan, Sm100Plan

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from ptxemu import Policy
from workbench.cli.lab_majorness import majorness
from workbench.lab.majorness import (
    PLANS,
    REFERENCE_MAX_ABS,
    MajornessReport,
    Study,
    limit_of,
    run_study,
)
from workbench.lab.operand_view import Recording, step_views
from workbench.lab.runs import emulator_runner, exported_name
from workbench.lab.tile_picture import draw_tiles

Result = tuple[Study, MajornessReport, dict[str, Recording]]
SMALL = {"n": 64, "k": 64}


def run(
    arch: str, *, majors: tuple[str, ...] = ("k", "mn"), data: str = "random", **plan
) -> Result:
    study = Study(arch, PLANS[arch](**plan), majors, data)
    return study, *run_study(study, emulator_runner(Policy(asynchronous="late")))


@pytest.fixture(scope="module")
def study() -> Result:
    return run("sm_100a")


@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=pytest.mark.slow), "sm_100a"])
def test_the_study_s_numbers(arch: str, study: Result) -> None:
    _, report, _ = study if arch == "sm_100a" else run(arch)
    assert report.plan["m"], report.plan["n"] == (64, 256)
    assert report.max_reference > 8  # values large enough for the limit to mean something
    assert report.limit == REFERENCE_MAX_ABS == pytest.approx(7.629395e-06, rel=1e-7)
    for result in report.results.values():
        assert 0 < result.max_abs <= REFERENCE_MAX_ABS
        assert result.part0_max_abs is not None and result.part0_max_abs <= REFERENCE_MAX_ABS
        assert result.cuts_identical and result.findings == []
        assert all(step.difference is None for step in result.steps)
    assert report.k_vs_mn == 0
    assert report.failures == []


@pytest.mark.parametrize(
    ("arch", "plan"),
    [
        ("sm_100a", {"a_major": "mn", "m": 128, "swizzle": 0, "cut": "shape"}),
        ("sm_90a", {"a_major": "mn", "boundary": False, "swizzle": 32, "cut": "shape"}),
        ("sm_90a", {"dtype": "f16", "swizzle": 0, "boundary": False}),
    ],
)
def test_integers_are_exact_in_every_form(arch: str, plan: dict) -> None:
    _, report, _ = run(arch, data="integer", **SMALL | plan)
    assert report.limit == 0 and report.failures == []


def test_wgmma_takes_narrow_types_k_major() -> None:
    _, report, _ = run("sm_90a", majors=("k",), data="integer", dtype="e5m2", n=64)
    assert report.failures == [] and report.k_vs_mn is None


def test_descriptors_are_those_of_the_canonical_layouts(study: Result) -> None:
    _, report, recordings = study
    base = recordings["k"].image_address + report.plan["m"] * report.plan["k"] * 2
    k_major = [v.fields for v in report.results["k"].steps if v.operand == "B"]
    mn_major = [v.fields for v in report.results["mn"].steps if v.operand == "B"]
    # 64 heads of 2 bytes are one swizzle atom of 256 rows: 32 bytes a step, 32768 a part
    starts = [base + 32768 * part + 32 * step for part in range(2) for step in range(4)]
    assert [f["start_address"] for f in k_major] == starts
    # 64 columns of 2 bytes are one row of the atom: 16 heads are 2048 bytes, a part 8192
    assert [f["start_address"] for f in mn_major] == [base + 2048 * step for step in range(8)]
    assert {(f["leading_byte_offset"], f["stride_byte_offset"]) for f in mn_major} == {
        (16384, 1024)
    }
    assert {f["swizzle"] for f in (*k_major, *mn_major)} == {"128B"}
    transposes = [r.instruction_fields["transpose_b"] for r in report.results.values()]
    assert transposes == [False, True]


def test_a_changed_byte_is_named(study: Result) -> None:
    what, _, recordings = study
    image = recordings["mn"].image.copy()
    address = what.plan.b_offset + 128 + 16 + 1  # k 1, n 1: a row further, chunk 1 holds chunk 0
    image[address] ^= 0x40
    changed = replace(recordings["mn"], image=image)
    plan = replace(what.plan, b_major="mn")
    views = step_views(what.arch, plan, what.inputs(), changed)
    wrong = [view for view in views if view.difference is not None]
    assert [(view.operand, view.part, view.step) for view in wrong] == [("B", 0, 0)]
    assert "1 of 4096 differ, first (n 0, k 1)" in str(wrong[0].difference)


def test_a_wrong_stride_in_a_descriptor_is_seen(study: Result) -> None:
    what, _, recordings = study
    descriptors = recordings["k"].descriptors.copy()
    descriptors[0, 1, 0, 1] += np.uint64(1 << 32)  # SBO of B's first step of part 1: 16 more
    changed = replace(recordings["k"], descriptors=descriptors)
    views = step_views(what.arch, what.plan, what.inputs(), changed)
    assert [(v.operand, v.part, v.step) for v in views if v.difference] == [("B", 1, 0)]
    assert not changed.cuts_identical


def test_a_wrong_result_fails(study: Result) -> None:
    _, report, _ = study
    result = replace(report.results["mn"], max_abs=1e-5)
    wrong = replace(report, results=report.results | {"mn": result}, k_vs_mn=1e-5)
    assert wrong.failures == [
        "MN vs reference: 1.000000e-05 > 7.629395e-06",
        "K vs MN: 1.000000e-05, expected exactly 0",
    ]


def test_limits_grow_with_the_numbers_only() -> None:
    study = Study("sm_90a", PLANS["sm_90a"]())
    assert limit_of(study, 10.0, on_hardware=False) == REFERENCE_MAX_ABS
    assert limit_of(study, 32.0, on_hardware=False) == 2 * REFERENCE_MAX_ABS
    wide = replace(study, plan=replace(study.plan, dtype="e4m3"))
    assert limit_of(wide, 8.0, on_hardware=True) == 8 * 2.0**-12


@pytest.mark.slow
def test_the_picture_is_drawn(study: Result, tmp_path: Path) -> None:
    what, _, recordings = study
    draw_tiles(what, recordings, tmp_path / "tiles.png")
    assert (tmp_path / "tiles.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_the_tables_and_json() -> None:
    arguments = ["--n", "64", "--k", "64", "--no-boundary", "--swizzle", "64"]
    shown = CliRunner().invoke(majorness, arguments)
    assert shown.exit_code == 0 and "Result: PASS" in shown.output
    assert "K vs MN" in shown.output and "identical descriptors" in shown.output
    document = json.loads(CliRunner().invoke(majorness, [*arguments, "--json"]).output)
    assert document["passed"] and document["k_vs_mn"] == 0
    steps = document["results"]["mn"]["steps"]
    assert len(steps) == 8 and all(step["difference"] is None for step in steps)


def test_kernels_are_compiled_to_a_file_by_the_names_that_a_gpu_looks_up(tmp_path: Path) -> None:
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    from flashdsa.jit.shared_object import load_shared_object

    arguments = ["--arch", "sm_90a", "--n", "64", "--k", "64", "--b-major", "mn"]
    done = CliRunner().invoke(majorness, [*arguments, "--compile-to", str(tmp_path / "k.so")])
    assert done.exit_code == 0, done.output
    find = load_shared_object(tmp_path / "k.so")
    plan = PLANS["sm_90a"](b_major="mn", **SMALL)
    assert callable(find(exported_name(plan)))
    with pytest.raises(AttributeError):
        find(exported_name(replace(plan, b_major="k")))


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
