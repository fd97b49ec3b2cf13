"""Sources of a compiled kernel, as one hash: an object of other sources is never loaded.

The sources are found, not listed: the module that builds a kernel, and whatever of the package it
imports, read from the text without importing anything.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib.util import resolve_name
from pathlib import Path

from flashdsa.jit.shared_object import SHIM
from flashdsa.plan.kernel_spec import Variant

PACKAGE = Path(__file__).parents[1]


def source_hash(variants: Sequence[Variant], package: Path = PACKAGE) -> str:
    """Hash of the sources of these functions: their plans and all their source files."""
    digest = hashlib.sha256()
    for spec, plan in variants:
        module = spec.build.partition(":")[0]
        digest.update(f"{spec.build} {plan!r} {_files_hash(module, package)}\n".encode())
    return digest.hexdigest()[:16]


@lru_cache
def _files_hash(module: str, package: Path) -> str:
    return _hash_of(source_files(module, package), package)


@lru_cache
def package_hash(package: Path = PACKAGE) -> str:
    """Hash of every source file in the package, which takes 16 ms: while it is the same, so is
    every `source_hash`."""
    return _hash_of(sorted(package.rglob("*.py")), package)[:16]


def _hash_of(files: Sequence[Path], package: Path) -> str:
    """Hash of the files' names and contents, and of what is linked into every object."""
    digest = hashlib.sha256()
    for path in [*files, package / SHIM.relative_to(PACKAGE)]:
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def source_files(module: str, package: Path = PACKAGE) -> list[Path]:
    """The files of the package that importing `module` runs, in the order of their names.

    The package's own `__init__.py` is left out: it is the users' entry and imports late.
    """
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file_of(name, package)
        if name in found or path is None:
            continue
        found[name] = path
        is_package = path.name == "__init__.py"
        waiting += _imports_of(path, name if is_package else name.rpartition(".")[0])
        waiting.append(name.rpartition(".")[0])
    return sorted(found.values())


@cache
def _file_of(name: str, package: Path) -> Path | None:
    """The module's file; None: another package's, or no module but a name in one."""
    root, *parts = name.split(".")
    if root != package.name or not parts:
        return None
    path = package.joinpath(*parts)
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


@cache
def _imports_of(path: Path, package: str) -> tuple[str, ...]:
    """Result of `_imported`, kept: kernels share most of their files, and reading one takes 1
    ms."""
    return tuple(_imported(path, package))


def _imported(path: Path, package: str) -> Iterator[str]:
    """Names that the file imports, wherever it does, but for type checkers."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and _asks_for_types(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.mod | ast.stmt | ast.ExceptHandler | ast.match_case):
            waiting += ast.iter_child_nodes(node)


def _asks_for_types(test: ast.expr) -> bool:
    """Whether a condition names TYPE_CHECKING."""
    return any(
        "TYPE_CHECKING" in (getattr(node, "id", ""), getattr(node, "attr", ""))
        for node in ast.walk(test)
    )
