"""`flashdsa info` and `flashdsa plan`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from click.testing import Result

from flashdsa.backends.catalog import registry
from flashdsa.backends.emulated import packages
from flashdsa.bench.machine import Gpu, HostMachine
from flashdsa.cli.availability import reason_against
from flashdsa.cli.plan import choices_of, find_variant, planned_kernels
from flashdsa.jit import loader
from flashdsa.kernels.catalog import BACKENDS as BACKENDS_WITH_KERNELS
from flashdsa.kernels.catalog import variants_of
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.plan.kernel_spec import KernelSpec
from flashdsa.settings import BACKENDS, Settings

Run = Callable[..., Result]


RUN_HERE = ("cpu", "torch", "emulate-sm90", "emulate-sm100", "emulate-triton")


def machine_with(*gpus: Gpu) -> HostMachine:
    return HostMachine("some CPU", 2, 2, 2**34, 3000, "Linux", gpus)


def test_json_has_a_row_for_every_operation_and_backend(run: Run) -> None:
    document = json.loads(run("info", "--json").stdout)
    rows = document["implementations"]
    assert {(row["operation"], row["backend"]) for row in rows} == {
        (operation, backend) for operation in registry.operations for backend in BACKENDS[1:]
    }
    for row in rows:
        assert row["runs_here"] == (not row["why_not"])
        assert row["implemented"] == (row["features"] is not None)
        here = row["implemented"] and row["backend"] in RUN_HERE
        assert row["runs_here"] == here


def test_json_says_where_every_kernel_comes_from(run: Run) -> None:
    rows = json.loads(run("info", "--json").stdout)["kernels"]
    assert [row["backend"] for row in rows] == list(BACKENDS_WITH_KERNELS)
    for row in rows:
        assert set(row["functions"]) == set(variants_of(row["backend"]))
        known = {"installed", "cached", "compiled at first use", "not here"}
        assert set(row["functions"].values()) <= known
        assert (row["state"] == "absent") == (row["object"] is None)


def test_text_says_of_a_stale_object_that_it_is_not_used(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "INSTALLED", tmp_path)
    (tmp_path / "sm90.so").write_bytes(b"flashdsa kernels of sources 0123456789abcdef;")
    said = "".join(run("info").output.split())  # a long path is folded anywhere
    assert "sm90.so,0.0MB:ofothersources,notused" in said


def test_json_has_machine_versions_and_settings(run: Run) -> None:
    document = json.loads(run("info", "--json").stdout)
    assert document["machine"]["logical_cores"] >= 1
    assert document["versions"]["torch"]
    assert [row["variable"] for row in document["settings"]] == [
        row[0] for row in Settings().rows()
    ]


@pytest.mark.parametrize("columns", ["80", "100", "200"])
def test_text_says_for_each_backend_whether_it_runs_and_loses_nothing(
    run: Run, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    output = run("info").output
    assert "cpu runs here" in output and "torch runs here" in output
    assert "sm90 does not run here: needs a GPU of compute capability 9.0; found no GPU" in output
    for word in ("sparse_mla_fwd", "FLASHDSA_BACKEND", "deterministic", "not in this version:"):
        assert word in output
    lines = output.splitlines()
    assert "…" not in output
    assert max(len(line) for line in lines) <= int(columns)
    assert len(lines) <= 12 + 9 * len(registry.operations)


def test_the_packages_that_an_emulated_backend_lacks_are_named_by_a_command_that_installs_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    said = "".join(run("info").output.split())
    assert "".join(packages.install_command([*packages.PACKAGES]).split()) in said


def test_an_emulated_backend_needs_the_compiler_and_the_emulators_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reason_against("emulate-sm90", machine_with()) is None
    there = ModuleSpec("there", None, origin="here")
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "cutlass" else there)
    assert reason_against("emulate-sm90", machine_with()) == (
        "needs the Python package cutlass; pip install 'nvidia-cutlass-dsl>=4.8,<5'"
    )


def test_a_gpu_backend_needs_its_own_capability() -> None:
    hopper = Gpu("NVIDIA H200", (9, 0), 2**37)
    assert reason_against("sm90", machine_with(hopper)) is None
    assert reason_against("cpu", machine_with()) is None
    assert reason_against("sm100", machine_with(hopper)) == (
        "needs a GPU of compute capability 10.0 or 10.3; found NVIDIA H200 (9.0)"
    )
    assert reason_against("sm100", machine_with(Gpu("NVIDIA B300", (10, 3), 2**38))) is None
    assert reason_against("sm90", machine_with()) == (
        "needs a GPU of compute capability 9.0; found no GPU"
    )


def test_json_holds_every_region_barrier_and_role(run: Run) -> None:
    document = json.loads(run("plan", "indexer", "--json", "--num-heads", "16").stdout)
    plan = IndexerPlan(num_heads=16)
    assert document["choices"]["num_heads"] == 16
    assert document["smem"]["total"] == plan.smem.total
    assert [r["offset"] for r in document["smem"]["regions"]] == list(plan.smem.offsets)
    assert [b["arrivals"] for b in document["barriers"]] == [b.arrivals for b in plan.barriers]
    assert [r["threads"] for r in document["roles"]] == [r.threads for r in plan.roles]


@pytest.mark.parametrize("option", [(), ("--markdown",), ("--rows", "clusters")], ids=str)
def test_text_and_markdown_show_all_tables_in_100_columns(run: Run, option: tuple[str]) -> None:
    output = run("plan", "indexer", "--arch", "sm_90a", *option).output
    threads = f"{IndexerPlan().threads} threads"
    for word in ("histogram", "232,448", "page_empty", "tile_full", "load", "select", threads):
        assert word in output
    if option != ("--markdown",):
        assert max(len(line) for line in output.splitlines()) <= 100


def test_brackets_are_text(run: Run) -> None:
    assert "Q of the item, 9 x [heads, 64] SW128" in run("plan", "mla_decode_heads").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-heads", "48"), "--num-heads: expected 16, 32 or 64; got 48"),
        (("--arch", "sm_80"), "'sm_80' is not one of 'sm_90a', 'sm_100a'"),
        (("--rows", "pages"), "--rows: expected cluster or clusters; got pages"),
        (
            ("--arch", "sm_100a", "--num-heads", "16", "--gathers"),
            "no variant is compiled with --num-heads 16 and --gathers",
        ),
        (("--json", "--markdown"), "--markdown: not together with --json"),
    ],
)
def test_bad_input_is_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run("plan", "indexer", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_plan_has_the_name_of_its_compiled_function_too(run: Run) -> None:
    """Names as `choose` prints them; not all kernels have roles to show."""
    document = json.loads(run("plan", "mla_fwd_drawn", "--json").stdout)
    assert document["kernel"] == "mla_fwd" and document["choices"]["drawn"]
    assert json.loads(run("plan", "mla_fwd", "--drawn", "--json").stdout) == document
    done = run("plan", "mla_used_slots")
    assert done.exit_code == 2 and "flashdsa inspect mla_used_slots" in done.stderr
    done = run("plan", "mla_fwd_drawn", "--json", "--markdown")
    assert done.exit_code == 2 and "--markdown: not together with --json" in done.stderr


@pytest.mark.parametrize(("name", "start"), [("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")])
def test_mla_bwds_picture_is_drawn_beside_the_tables(
    run: Run, tmp_path: Path, name: str, start: bytes
) -> None:
    result = run("plan", "mla_bwd", "--json", "--picture", str(tmp_path / name))
    assert json.loads(result.stdout)["kernel"] == "mla_bwd"
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize("spec", planned_kernels(), ids=lambda spec: f"{spec.name}-{spec.arch}")
def test_a_choice_that_is_not_compiled_is_answered_by_those_that_are(spec: KernelSpec) -> None:
    for name in choices_of([spec]):
        values = {variant.choices[name] for variant in spec.variants}
        if not isinstance(next(iter(values)), bool):
            with pytest.raises(ValueError) as error:
                find_variant(spec, {name: 513})
            said = str(error.value)
            assert said.startswith(f"--{name.replace('_', '-')}: expected ")
            listed = said.removesuffix("; got 513").partition("expected ")[2]
            assert {*re.split(", | or ", listed)} == {str(value) or "''" for value in values}


def test_the_kernels_pages_show_the_plans_of_today() -> None:
    """tools/plan_tables.py writes them."""
    tool = Path(__file__).parents[2] / "tools" / "plan_tables.py"
    run = subprocess.run(
        [sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
