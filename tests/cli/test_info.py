"""`flashdsa info`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from click.testing import Result

from flashdsa.backends.catalog import registry
from flashdsa.backends.emulated import packages
from flashdsa.bench.machine import Gpu, HostMachine
from flashdsa.cli.availability import reason_against
from flashdsa.jit import loader
from flashdsa.kernels.catalog import BACKENDS as BACKENDS_WITH_KERNELS
from flashdsa.kernels.catalog import variants_of
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
