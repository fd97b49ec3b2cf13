"""Compiled kernels come from an object of these very sources, a cache of them, or the compiler."""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashdsa.jit import functions
from flashdsa.jit.shared_object import build_shared_object, is_from, load_shared_object
from flashdsa.jit.sources import PACKAGE, source_hash
from flashdsa.jit.variants import sm90_variants
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan

SEVEN = """
#include <stdint.h>
struct any { int32_t type; uint32_t padding; int64_t value; };
int __tvm_ffi_%s(void *self, const struct any *arguments, int32_t count, struct any *result)
{
    result->type = 1; /* kTVMFFIInt */
    result->padding = 0;
    result->value = 7;
    return 0;
}
"""
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


class Seven:
    """What `cute.compile` returns, as far as `build_shared_object` looks: a function giving 7."""

    def export_to_c(self, path: str, *, function_name: str) -> None:
        source = Path(path).with_suffix(".c")
        source.write_text(SEVEN % function_name)
        subprocess.run(["gcc", "-c", "-fPIC", "-o", path, str(source)], check=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no installed object."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(functions, "INSTALLED", tmp_path / "installed.so")
    return tmp_path / "cache" / "flashdsa"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Objects that were loaded; each has the function "known", which is its path."""
    paths: list[Path] = []

    def load(path: Path) -> Callable[[str], Any]:
        paths.append(path)

        def find(name: str) -> Any:
            if name != "known":
                raise AttributeError(name)
            return path

        return find

    monkeypatch.setattr(functions, "load_shared_object", load)
    return paths


def _never() -> Any:
    raise AssertionError("compiled for nothing")


def _object_of(path: Path, sources: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF.." + f"flashdsa kernels of sources {sources};".encode() + b"\0..")
    return path


def test_the_installed_object_serves_where_its_sources_are_these(
    cache: Path, loaded: list[Path]
) -> None:
    path = _object_of(functions.INSTALLED, source_hash())
    assert functions.function_named("known", _never) == path
    assert loaded == [path]


def test_a_stale_installed_object_is_never_loaded(
    cache: Path, loaded: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    _object_of(functions.INSTALLED, "0123456789abcdef")
    cached = _object_of(cache / f"known-{source_hash()}.so", source_hash())
    with caplog.at_level(logging.WARNING, logger="flashdsa.jit"):
        assert functions.function_named("known", _never) == cached
    assert loaded == [cached]
    assert "was built from other sources" in caplog.text


def test_what_the_installed_object_lacks_is_compiled(
    cache: Path, loaded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _object_of(functions.INSTALLED, source_hash())
    monkeypatch.setattr(shutil, "which", lambda _: None)  # no C compiler: nothing can be kept
    assert functions.function_named("unknown", lambda: "compiled") == "compiled"


@needs_gcc
def test_compiling_happens_once_a_user_and_says_so(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("nvidia_cutlass_dsl", reason="its static library is linked in")
    with caplog.at_level(logging.INFO, logger="flashdsa.jit"):
        assert functions.function_named("seven", Seven)() == 7
    assert "compiling seven, once" in caplog.text
    assert [path.name for path in cache.iterdir()] == [f"seven-{source_hash()}.so"]
    assert functions.function_named("seven", _never)() == 7


@needs_gcc
def test_a_folder_that_cannot_be_written_keeps_the_compiled_function_in_the_process(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    seven = Seven()
    assert functions.function_named("seven", lambda: seven) is seven
    assert "serves this process only" in caplog.text


@needs_gcc
def test_a_failed_build_leaves_the_old_object_and_its_reason(tmp_path: Path) -> None:
    pytest.importorskip("nvidia_cutlass_dsl", reason="its static library is linked in")

    class Broken:
        def export_to_c(self, path: str, *, function_name: str) -> None:
            Path(path).write_text("no object")

    target = tmp_path / "kernels.so"
    build_shared_object(target, {"seven": Seven()}, "aaaa")
    with pytest.raises(RuntimeError, match="could not link the kernels"):
        build_shared_object(target, {"broken": Broken()}, "bbbb")
    assert is_from(target, "aaaa")
    assert not is_from(target, "bbbb")
    assert load_shared_object(target)("seven")() == 7
    assert list(tmp_path.iterdir()) == [target]


def test_only_an_object_that_says_so_is_from_these_sources(tmp_path: Path) -> None:
    assert not is_from(tmp_path / "missing.so", "aaaa")
    (tmp_path / "empty.so").touch()
    assert not is_from(tmp_path / "empty.so", "aaaa")
    assert is_from(_object_of(tmp_path / "a.so", "aaaa"), "aaaa")
    assert not is_from(_object_of(tmp_path / "a.so", "aaaab"), "aaaa")


def test_the_hash_follows_every_source_of_the_kernels(tmp_path: Path) -> None:
    package = tmp_path / "flashdsa"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "_kernels"))
    before = source_hash(package)
    assert before == source_hash()
    for name in (
        "kernels/indexer/sm90/plan.py",
        "plan/smem.py",
        "problem.py",
        "jit/runtime_shim.c",
    ):
        source_hash.cache_clear()
        with (package / name).open("a") as file:
            file.write("\n")
        after = source_hash(package)
        assert after != before, name
        before = after
    (package / "cli" / "main.py").write_text("")
    source_hash.cache_clear()
    assert source_hash(package) == before


def test_every_size_has_one_exported_name() -> None:
    names = list(sm90_variants())
    assert len(names) == len(set(names)) >= 18
    assert functions.indexer_name(IndexerPlan()) in names
    assert functions.indexer_name(IndexerPlan(16, 512, sorted=True, dealt=True)) in names


def test_importing_the_package_compiles_and_loads_nothing() -> None:
    code = (
        "import sys, flashdsa.api, flashdsa.backends.sm90.indexer\n"
        "sys.exit(any(name in sys.modules for name in ('cutlass', 'tvm_ffi')))"
    )
    import sys

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
