"""A kernel's hash covers what it is compiled from, found in the text, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashdsa.jit import sources
from flashdsa.jit.sources import PACKAGE, source_files, source_hash
from flashdsa.kernels.catalog import BACKENDS, INDEXER, KERNELS, MLA_BWD, variants_of
from flashdsa.plan.kernel_spec import KernelSpec, Variant
from tests.support.subtests import CaseLoop

Hashes = Callable[[], dict[str, str]]
EACH_ALONE = """
import importlib, os, sys
import cutlass.cute.runtime, cutlass.pipeline

assert not any(name.startswith("flashdsa") for name in sys.modules)
for module in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(module)
        files = (m.__file__ for n, m in sys.modules.items() if n.startswith("flashdsa."))
        print(module, *files, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, module
"""
"""Imports each module in a process of its own, behind an import of CuTe DSL that all share."""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, to edit."""
    copy = tmp_path / "flashdsa"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "_kernels"))
    return copy


@pytest.fixture
def hashes(package: Path) -> Hashes:
    """Each backend's hash, of the copy as it is now."""

    def now() -> dict[str, str]:
        sources._files_hash.cache_clear()
        return {
            backend: source_hash(list(variants_of(backend).values()), package)
            for backend in BACKENDS
        }

    return now


FOLLOW = [
    ("kernels/indexer/sm90/plan.py", {"sm90"}),
    ("kernels/attention/ordered_sum.py", {"sm90", "sm100"}),
    ("kernels/attention/sm100/bwd/plan.py", {"sm100"}),
    ("plan/smem.py", {"sm90", "sm100"}),
    ("hw.py", {"sm90", "sm100"}),
    ("jit/runtime_shim.c", {"sm90", "sm100"}),
    ("kernels/catalog.py", set()),
    ("plan/kernel_spec.py", set()),
    ("jit/loader.py", set()),
    ("cli/main.py", set()),
]
"""A file, and the backends whose kernels are made from it."""


def test_an_edit_recompiles_what_is_made_from_the_file(
    subtests: CaseLoop, package: Path, hashes: Hashes
) -> None:
    for name, follow in FOLLOW:
        before = hashes()
        assert len(set(before.values())) == len(before)
        with (package / name).open("a") as file:
            file.write("\n")
        after = hashes()
        with subtests.test(name):
            assert {backend for backend in before if after[backend] != before[backend]} == follow


def test_a_plan_that_changes_recompiles_itself_alone() -> None:
    first, second = INDEXER.variants[:2]
    assert source_hash([first]) != source_hash([second])
    assert source_hash([first]) == source_hash([Variant(INDEXER, INDEXER.plans[0])])


@pytest.fixture(scope="module")
def imported() -> dict[str, list[Path]]:
    """Of each kernel's module, the files of the package that Python imports for it."""
    pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")
    command = [sys.executable, "-c", EACH_ALONE, *sorted(map(module_of, KERNELS))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {module: sorted(map(Path, files)) for module, *files in lines}


def module_of(spec: KernelSpec) -> str:
    """The module that compiles it."""
    return spec.build.partition(":")[0]


def test_what_is_found_is_what_python_imports(
    subtests: CaseLoop, imported: dict[str, list[Path]]
) -> None:
    """But for the package's front door, and what only type checkers read."""
    for spec in KERNELS:
        with subtests.test(spec.name):
            assert imported[module_of(spec)] == source_files(module_of(spec))


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    package = tmp_path / "flashdsa"
    files = {
        "a/__init__.py": "",
        "a/build.py": "from flashdsa.a import near\nfrom flashdsa.b.far import name\n",
        "a/near.py": "if TYPE_CHECKING:\n    import flashdsa.c\nelse:\n    import flashdsa.d\n",
        "b/far.py": "def late():\n    with x:\n        from . import e\n        import numpy\n",
        "b/e.py": "try:\n    pass\nexcept ImportError:\n    from ..f import g\n",
        "c.py": "",
        "d.py": "",
        "f.py": "",
        "__init__.py": "import flashdsa.c",
    }
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    found = source_files("flashdsa.a.build", package)
    assert [path.relative_to(package).as_posix() for path in found] == [
        "a/__init__.py", "a/build.py", "a/near.py", "b/e.py", "b/far.py", "d.py", "f.py",
    ]  # fmt: skip


def test_the_backwards_sources_are_its_own() -> None:
    module = module_of(MLA_BWD)
    kernels = PACKAGE / "kernels"
    own = {path for path in source_files(module) if path.is_relative_to(kernels)}
    assert all(path.name == "__init__.py" or "attention" in path.parts for path in own)
