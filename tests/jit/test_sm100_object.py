"""Blackwell's object: built here, without such a GPU; loaded where it is of these sources, only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from flashdsa.jit.loader import installed_hash, load
from flashdsa.jit.shared_object import is_from
from flashdsa.kernels.catalog import MLA_BWD
from tests.support.houses import ROOT, copy_build_files
from tools import build_kernels

MAX_BYTES = 250_000
"""Of an object for each of its functions, of three small kernels at most."""
PARAMETERS = {"mla_bwd": 12, "mla_bwd_deterministic": 15}
"""Of functions, by name; those of groups have 17."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make kernels` makes of the backwards for Blackwell, beside no other object."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    target = tmp_path_factory.mktemp("kernels") / "sm100.so"
    assert "{0}/{0} ".format(len(MLA_BWD.plans)) in _build(target, "--only", "mla_bwd")
    return target


def _build(target: Path, *options: str) -> str:
    command = [sys.executable, "tools/build_kernels.py", "--arch", "sm100", "--target", str(target)]
    command += options
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_object_is_small_of_these_sources_and_not_built_again(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plans = built, MLA_BWD.plans
    assert path.stat().st_size < MAX_BYTES * len(plans)
    assert is_from(path, installed_hash("sm100"))
    assert not is_from(path, installed_hash("sm90"))
    assert not build_kernels.is_whole("sm100", path)
    monkeypatch.setattr(build_kernels, "variants_of", lambda _: {p.name: p for p in plans})
    build_kernels.build("sm100", path, "")
    assert "is up to date" in capsys.readouterr().out


@pytest.mark.slow
def test_its_functions_load_without_a_compiler_and_know_their_arguments(built: Path) -> None:
    """The loader of Hopper's object, in a process where CuTe DSL cannot be imported."""
    pytest.importorskip("tvm_ffi")
    code = (
        "import sys, pathlib\n"
        "sys.modules['cutlass'] = None\n"
        "from flashdsa.jit import loader\n"
        "from flashdsa.kernels.catalog import MLA_BWD\n"
        f"loader.INSTALLED = pathlib.Path({str(built)!r}).parent\n"
        "for spec, plan in MLA_BWD.variants:\n"
        "    try:\n"
        "        loader.load(spec, plan)(1)\n"
        "    except TypeError as error:\n"
        "        print(str(error).partition(' parameters')[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    numbers = [PARAMETERS.get(plan.name, 17) for plan in MLA_BWD.plans]
    assert done.stdout.splitlines() == [f"Expects {number}" for number in numbers]


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    load.cache_clear()


def _wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder / "out"), str(folder / "tree")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (folder / "out").glob("*.whl")
    return wheel


@pytest.mark.parametrize(
    "built", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["with kernels", "without"]
)
def test_the_wheel_holds_the_kernels_that_were_built(tmp_path: Path, built: bool) -> None:
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "_kernels", "ptxemu")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignored)
    copy_build_files("flashdsa", tree)
    if built:
        (tree / "src/flashdsa/_kernels").mkdir()
        (tree / "src/flashdsa/_kernels/sm90.so").write_bytes(b"kernels")
    wheel = _wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "flashdsa/jit/runtime_shim.c" in names
    assert ("flashdsa/_kernels/sm90.so" in names) == built
    assert ("-py3-none-any.whl" in wheel.name) != built
    assert "-py3-none-" in wheel.name
