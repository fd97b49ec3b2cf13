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
from flashdsa.backends.features import FLAGS
from flashdsa.bench import machine
from flashdsa.bench.machine import Gpu, HostMachine
from flashdsa.cli.availability import reason_against
from flashdsa.jit import loader, origins
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
def test_text_says_in_few_lines_for_each_backend_whether_it_runs(
    run: Run, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.delenv("FLASHDSA_BACKEND", raising=False)
    lines = run("info").output.splitlines()
    found = {line.split()[0]: line.partition(" ")[2].strip() for line in lines if line}
    for backend in BACKENDS[1:]:
        assert found[backend].startswith("yes" if backend in RUN_HERE else "no: "), backend
    assert found["sm90"] == "no: needs a GPU of compute capability 9.0; found no GPU"
    assert len(lines) <= 8 + len(BACKENDS[1:])
    assert max(map(len, lines)) <= int(columns)


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_tables_lose_nothing(run: Run, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    every = run("info", "--all").output
    for word in ("sparse_mla_fwd", "FLASHDSA_BACKEND", "deterministic", "not in this version:"):
        assert word in every
    assert "…" not in every and max(map(len, every.splitlines())) <= int(columns)
    for backend in BACKENDS[1:]:
        one = run("info", backend).output
        heading = f"\n{backend}\n"
        assert one.partition(heading)[2].strip() in every
        assert all((f"\n{other}\n" in one) == (other == backend) for other in BACKENDS[1:])
        assert [other for other in BACKENDS[1:] if f"\n{other} " in one] == [backend]


def test_a_setting_that_is_set_is_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDSA_MAX_CLUSTER", "7")
    monkeypatch.delenv("FLASHDSA_CHECK", raising=False)
    assert "\nFLASHDSA_MAX_CLUSTER=7\n" in run("info").output
    assert "FLASHDSA_CHECK" not in run("info").output


def test_kernels_that_nothing_can_compile_are_said_with_what_would(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(origins, "package_version", lambda _: None)
    monkeypatch.setattr(loader, "INSTALLED", tmp_path)
    monkeypatch.setattr(origins, "cache_folder", lambda: tmp_path)
    missing = f"kernels: {len(variants_of('sm90'))}, none compiled: pip install 'nvidia-cutlass-dsl"
    assert missing in " ".join(run("info", "sm90").output.split())
    hopper = machine_with(Gpu("NVIDIA H200", (9, 0), 2**37))
    monkeypatch.setattr(machine, "describe_machine", lambda: hopper)
    said = " ".join(run("info").output.split())
    assert f"sm90 no: {missing}" in said and "GPU: NVIDIA H200 (9.0)" in said
    monkeypatch.setattr(origins, "package_version", lambda _: "4.8")
    assert "compiled at first use sm100 no: " in " ".join(run("info").output.split())


def test_a_bad_choice_of_tables_is_one_line(run: Run) -> None:
    assert "'sm91' is not one of" in run("info", "sm91").output
    assert "--json: has everything" in run("info", "--json", "--all").output


def test_no_implementation_lists_a_flag_that_its_operation_does_not_have() -> None:
    """The CPU serves every call."""
    for operation in registry.operations:
        known = registry.implementations(operation)
        served = {
            flag
            for flag in FLAGS
            if any(getattr(one.features, flag) for one in known if one.backend == "cpu")
        }
        for one in known:
            own = {flag for flag in FLAGS if getattr(one.features, flag)}
            assert own <= served, (operation, one.backend, own - served)


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
