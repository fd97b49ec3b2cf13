"""Compiled kernels come from an object of these very sources, a cache of them, or the compiler."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashdsa.errors import UnsupportedError
from flashdsa.jit import cuda_library, loader, manifest
from flashdsa.jit.loader import compile_plan, installed_hash, installed_object, load
from flashdsa.jit.shared_object import build_shared_object, is_from, load_shared_object
from flashdsa.jit.sources import package_hash
from flashdsa.jit.user_cache import cache_key, file_name
from flashdsa.kernels.catalog import INDEXER
from flashdsa.kernels.indexer.plan import Sharing
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.plan.kernel_spec import Variant
from tests.jit.fake_kernel import COMPILED, KNOWN, SEVEN_PLAN, SPEC, UNKNOWN, Seven, SevenPlan

ROOT = Path(__file__).parents[2]
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
PROCESSES = 2


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    load.cache_clear()
    loader._installed.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no installed object."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "INSTALLED", tmp_path / "installed")
    return tmp_path / "cache" / "flashdsa"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Objects that were loaded; each has the function "known", which is its path."""
    paths: list[Path] = []

    def load_object(path: Path) -> Callable[[str], Any]:
        paths.append(path)

        def find(name: str) -> Any:
            if name != "known":
                raise AttributeError(name)
            return path

        return find

    monkeypatch.setattr(loader, "load_shared_object", load_object)
    return paths


def _compiling(monkeypatch: pytest.MonkeyPatch, compiled: object) -> None:
    """`compiled` is what compiling gives; None: it must not happen."""

    def compile_now(*_: object) -> object:
        assert compiled is not None, "compiled for nothing"
        return compiled

    monkeypatch.setattr(loader, "compile_plan", compile_now)


def _object_of(path: Path, sources: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF.." + f"flashdsa kernels of sources {sources};".encode() + b"\0..")
    return path


def cached_object(cache: Path, plan: Any) -> Path:
    """What `build_shared_object` would have left in the cache, as far as the loader looks."""
    cache.mkdir(0o700, parents=True, exist_ok=True)
    variant = Variant(SPEC, plan)
    path = _object_of(cache / file_name(variant), cache_key(variant))
    path.write_bytes(path.read_bytes() + hashlib.sha256(path.read_bytes()).digest())
    return path


def test_the_installed_object_serves_where_its_sources_are_these(
    cache: Path, loaded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _compiling(monkeypatch, None)
    path = _object_of(installed_object("sm90"), installed_hash("sm90"))
    before = loader.loaded_variants()
    assert load(SPEC, KNOWN) == path
    assert load(SPEC, KNOWN) == path
    assert loaded == [path]
    assert loader.loaded_variants() == (*before, Variant(SPEC, KNOWN))
    assert loader.loaded_origins()["installed"] >= 1
    loader.require_kernels("sm90")


def test_a_stale_installed_object_is_never_loaded(
    cache: Path,
    loaded: list[Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _compiling(monkeypatch, None)
    _object_of(installed_object("sm90"), "0123456789abcdef")
    cached = cached_object(cache, KNOWN)
    with caplog.at_level(logging.WARNING, logger="flashdsa.jit"):
        assert load(SPEC, KNOWN) == cached
    assert loaded == [cached] and loader._loaded[Variant(SPEC, KNOWN)] == "cached"
    assert "was built from other sources" in caplog.text


def test_sources_are_not_read_again_while_the_package_is_the_manifests(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = installed_hash("sm90")
    path = _object_of(installed_object("sm90"), right)
    monkeypatch.setattr(manifest, "function_names", lambda _: [])
    said = json.loads(manifest.write_manifest(path.parent).read_text())
    assert said["objects"]["sm90.so"]["package"] == package_hash()
    monkeypatch.setattr(loader, "source_hash", lambda _: "read again")
    assert installed_hash("sm90") == right
    said["objects"]["sm90.so"]["package"] = "another package"
    (path.parent / manifest.NAME).write_text(json.dumps(said))
    assert installed_hash("sm90") == "read again"


def test_the_manifest_of_a_stale_object_vouches_for_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _object_of(installed_object("sm90"), "0123456789abcdef")
    monkeypatch.setattr(manifest, "function_names", lambda _: [])
    assert manifest.describe(path)["package"] == ""


def test_what_the_installed_object_lacks_is_compiled(
    cache: Path, loaded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _object_of(installed_object("sm90"), installed_hash("sm90"))
    monkeypatch.setattr(shutil, "which", lambda _: None)  # no C compiler: nothing can be kept
    _compiling(monkeypatch, "compiled")
    assert load(SPEC, UNKNOWN) == "compiled"


@needs_gcc
def test_compiling_happens_once_a_user_and_says_so(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nvidia_cutlass_dsl", reason="its static library is linked in")
    _compiling(monkeypatch, Seven())
    with caplog.at_level(logging.INFO, logger="flashdsa.jit"):
        assert load(SPEC, SEVEN_PLAN)() == 7
    assert "compiling seven, once" in caplog.text
    kept = Path(file_name(Variant(SPEC, SEVEN_PLAN)))
    assert {path.name for path in cache.iterdir()} <= {kept.name, kept.with_suffix(".lock").name}
    load.cache_clear()
    _compiling(monkeypatch, None)
    assert load(SPEC, SEVEN_PLAN)() == 7


@needs_gcc
def test_processes_that_start_at_once_compile_once(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvidia_cutlass_dsl", reason="its static library is linked in")
    code = (
        "from flashdsa.jit import loader\n"
        "from tests.jit.fake_kernel import SEVEN_PLAN, SPEC\n"
        f"loader.INSTALLED = loader.Path({str(tmp_path)!r})\n"
        "print(loader.load(SPEC, SEVEN_PLAN)())"
    )
    record = tmp_path / "compiled"
    environment = os.environ | {COMPILED: str(record), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        for _ in range(PROCESSES)
    ]
    assert [process.communicate()[0].split() for process in running] == [[b"7"]] * PROCESSES
    assert len(record.read_text().splitlines()) == 1


@needs_gcc
def test_a_folder_that_cannot_be_written_keeps_the_compiled_function_in_the_process(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    seven = Seven()
    _compiling(monkeypatch, seven)
    assert load(SPEC, SEVEN_PLAN) is seven
    assert loader._loaded[Variant(SPEC, SEVEN_PLAN)] == "compiled"
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


OTHER = IndexerPlan(sharing=Sharing(select_pages=21))


def test_plans_that_are_not_the_catalogs_are_refused() -> None:
    """They would have the name of one that is."""
    assert OTHER.name == IndexerPlan().name
    with pytest.raises(ValueError, match="indexer: compiled for its catalog's plans only"):
        load(INDEXER, OTHER)


def test_without_cute_dsl_an_error_says_what_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(UnsupportedError, match="pip install 'nvidia-cutlass-dsl"):
        loader.require_kernels("sm90")
    with pytest.raises(UnsupportedError, match="pip install 'nvidia-cutlass-dsl"):
        compile_plan(SPEC, SevenPlan("seven"))


class Library:
    """A library with some functions, at addresses of its own."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int32)(lambda: 0))


RUNTIME = [name for name in cuda_library.FUNCTIONS if name.startswith("cuda")]
DRIVER = [name for name in cuda_library.FUNCTIONS if not name.startswith("cuda")]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Libraries by their names; those that were opened are under "opened"."""
    libraries: dict[str, Any] = {"opened": []}

    def open_library(name: str) -> Any:
        libraries["opened"].append(name)
        return libraries.get(name)

    monkeypatch.setattr(cuda_library, "_open", open_library)
    cuda_library._functions.cache_clear()
    yield libraries
    cuda_library._functions.cache_clear()


def _torch_of(cuda: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda)))


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [("12.8", "libcudart.so.12"), ("13.0", "libcudart.so.13"), (None, "libcudart.so.13")],
)
def test_the_runtime_is_of_torchs_cuda(
    cuda: str | None, expected: str, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though both are on the machine."""
    machine |= {name: Library(*RUNTIME) for name in cuda_library.RUNTIMES}
    machine[cuda_library.DRIVER] = Library(*DRIVER)
    _torch_of(cuda, monkeypatch)
    assert set(cuda_library.cuda_functions()) == set(cuda_library.FUNCTIONS)
    assert [name for name in machine["opened"] if "cudart" in name] == [expected]


def test_the_other_runtime_serves_where_torchs_is_not_there(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["libcudart.so.13"] = Library(*RUNTIME)
    _torch_of("12.9", monkeypatch)
    assert set(cuda_library.cuda_functions()) == set(RUNTIME)


def test_an_old_runtime_is_refused_by_its_version(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["libcudart.so.12"] = Library(*[name for name in RUNTIME if "Library" not in name][1:])
    _torch_of("12.6", monkeypatch)
    with pytest.raises(UnsupportedError, match=r"need the CUDA 12.8 runtime or newer; .* has 12.6"):
        cuda_library.cuda_functions()


def test_a_machine_without_cuda_has_none(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _torch_of(None, monkeypatch)
    assert cuda_library.cuda_functions() == {}
