"""Blackwell's object: built here, without such a GPU; loaded where it is of these sources, only."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashdsa.jit import backward, functions
from flashdsa.jit.shared_object import is_from
from flashdsa.jit.sources import PACKAGE, source_hash
from flashdsa.jit.variants import VARIANTS

ROOT = Path(__file__).parents[2]
MAX_BYTES = 1_000_000
"""Of the object: two functions of three small kernels at most."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make kernels` makes for Blackwell, beside no other object."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    target = tmp_path_factory.mktemp("kernels") / "sm100.so"
    assert "2/2 mla_bwd_deterministic" in _build(target)
    return target


def _build(target: Path) -> str:
    command = [sys.executable, "tools/build_kernels.py", "--arch", "sm100", "--target", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_object_is_small_of_these_sources_and_not_built_again(built: Path) -> None:
    assert built.stat().st_size < MAX_BYTES
    assert is_from(built, source_hash(arch="sm100"))
    assert not is_from(built, source_hash(arch="sm90"))
    assert "is up to date" in _build(built)


def test_its_functions_load_without_a_compiler_and_know_their_arguments(built: Path) -> None:
    """The loader of Hopper's object, in a process where CuTe DSL cannot be imported."""
    pytest.importorskip("tvm_ffi")
    code = (
        "import sys, pathlib\n"
        "sys.modules['cutlass'] = None\n"
        "from flashdsa.jit import functions\n"
        "from flashdsa.jit.backward import backward_function\n"
        f"functions.INSTALLED = pathlib.Path({str(built)!r}).with_name('sm90.so')\n"
        "for deterministic in (False, True):\n"
        "    try:\n"
        "        backward_function(deterministic)(1)\n"
        "    except TypeError as error:\n"
        "        print(str(error).partition('(')[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Expects 11 parameters when calling: `launch_backward",
        "Expects 14 parameters when calling: `launch_deterministic_backward",
    ]


@pytest.fixture
def beside_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of Blackwell's installed object; what is loaded from there is its path."""
    monkeypatch.setattr(functions, "INSTALLED", tmp_path / "sm90.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def load(path: Path) -> Callable[[str], Any]:
        return {backward.backward_name(deterministic): path for deterministic in (0, 1)}.__getitem__

    monkeypatch.setattr(functions, "load_shared_object", load)
    backward.backward_function.cache_clear()
    return tmp_path / "sm100.so"


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    backward.backward_function.cache_clear()


def _object_of(path: Path, sources: str) -> Path:
    path.write_bytes(b"\x7fELF.." + f"flashdsa kernels of sources {sources};".encode() + b"\0..")
    return path


def test_the_installed_object_serves_where_its_sources_are_these(beside_hopper: Path) -> None:
    _object_of(beside_hopper, source_hash(arch="sm100"))
    assert backward.backward_function() == beside_hopper
    assert backward.backward_function(True) == beside_hopper


@pytest.mark.parametrize("sources", ["0123456789abcdef", source_hash(arch="sm90")])
def test_an_object_of_other_sources_is_refused_and_the_kernel_compiled(
    beside_hopper: Path,
    sources: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _object_of(beside_hopper, sources)
    monkeypatch.setattr(backward, "compile_backward", lambda plan, deterministic: "compiled")
    monkeypatch.setattr(shutil, "which", lambda _: None)  # no C compiler: nothing can be kept
    with caplog.at_level(logging.WARNING, logger="flashdsa.jit"):
        assert backward.backward_function() == "compiled"
    assert "sm100.so was built from other sources" in caplog.text


def test_an_architecture_s_hash_follows_its_kernels_only(tmp_path: Path) -> None:
    package = tmp_path / "flashdsa"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "_kernels"))

    def hashes() -> dict[str, str]:
        source_hash.cache_clear()
        return {arch: source_hash(package, arch) for arch in VARIANTS}

    before = hashes()
    assert len(set(before.values())) == len(VARIANTS)
    for name, follows in (
        ("kernels/sparse_mla/ordered_sum.py", {"sm100"}),
        ("lab/kernels/operand_forms/sm100/plan.py", set()),
        ("dsl/umma.py", set(VARIANTS)),
        ("kernels/indexer/sm90/plan.py", {"sm90"}),
        ("dsl/blackwell.py", set(VARIANTS)),
    ):
        with (package / name).open("a") as file:
            file.write("\n")
        after = hashes()
        assert {arch for arch in VARIANTS if after[arch] != before[arch]} == follows, name
        before = after
    source_hash.cache_clear()


def test_what_the_backward_imports_is_hashed() -> None:
    """Every module of ours that compiling the backward loads lies in a folder that is hashed."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")
    code = (
        "import sys\n"
        "import flashdsa.kernels.sparse_mla.sm100.bwd.build\n"
        "print(*sorted(name for name in sys.modules if name.startswith('flashdsa.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    folders = {"flashdsa.kernels.sparse_mla"} | {
        f"flashdsa.{name}" for name in ("dsl", "plan", "hw", "jit", "problem")
    }
    unseen = ("flashdsa.kernels", "flashdsa.errors")  # a docstring, and exceptions' names
    loaded = [name for name in done.stdout.split() if name not in unseen]
    strays = [n for n in loaded if not any(n == f or n.startswith(f + ".") for f in folders)]
    assert "flashdsa.dsl.umma" in loaded
    assert strays == []
