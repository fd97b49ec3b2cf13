"""Functions that only one role of a kernel runs, found from what the kernel's row names.

Nothing is imported: the kernel's source files are read. A function runs what its body names, a
class what its methods name, a constant what its value names. What the kernel also reaches
otherwise, and what several roles reach, is no role's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from flashdsa.jit.sources import PACKAGE, source_files
from flashdsa.plan.kernel_spec import KernelSpec, Variant
from flashdsa.plan.roles import Role


class Lines(NamedTuple):
    """Lines of a source file, with the last one."""

    file: str
    first: int
    last: int


class RoleLines(NamedTuple):
    """A role of a plan, and the lines of the functions that only its warps run."""

    role: Role
    lines: tuple[Lines, ...]


class _Definition(NamedTuple):
    """A function, class or constant of a module."""

    module: str
    name: str


def planned_roles(variant: Variant) -> tuple[RoleLines, ...]:
    """The plan's roles with their lines."""
    lines = role_functions(variant.spec)
    return tuple(RoleLines(role, lines[role.name]) for role in variant.plan.roles)


def role_functions(spec: KernelSpec) -> dict[str, tuple[Lines, ...]]:
    """Lines of the functions that only one role runs, by the role's name.

    Raises:
        KeyError: a name of `spec.roles` is not known in the module of the kernel's function, and
            has no definition elsewhere, or several.
    """
    sources = _Sources(source_files(spec.build.partition(":")[0]))
    kernel = sources.find(spec.entry)
    entries = {
        role: [sources.named(kernel.module, name) for name in names]
        for role, names in spec.roles.items()
    }
    every = [entry for of_role in entries.values() for entry in of_role]
    reached = {role: sources.reached(of_role) for role, of_role in entries.items()}
    reached[""] = sources.reached([kernel], cut=every)
    return {
        role: tuple(
            sources.lines(one)
            for one in sorted(mine)
            if all(one not in theirs for other, theirs in reached.items() if other != role)
        )
        for role, mine in reached.items()
        if role
    }


class _Module(NamedTuple):
    """A source file: its definitions, and what the names stand for that it imports."""

    file: Path
    own: dict[str, ast.stmt]
    imported: dict[str, _Definition]


@cache
def _read(file: Path) -> _Module:
    tree = ast.parse(file.read_text())
    own: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own[node.name] = node
        elif isinstance(node, ast.Assign):
            own |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    imported = {
        alias.asname or alias.name: _Definition(node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return _Module(file, own, imported)


class _Sources:
    """The modules of a kernel, by name."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._modules = {_name_of(file): _read(file) for file in files}

    def find(self, name: str) -> _Definition:
        """Find the only definition of a name; KeyError: there is none, or several."""
        found = [module for module, read in self._modules.items() if name in read.own]
        if len(found) != 1:
            raise KeyError(name)
        return _Definition(found[0], name)

    def resolve(self, module: str, name: str) -> _Definition:
        """Resolve a name of a module; KeyError: nothing that these files define."""
        if name in self._modules[module].own:
            return _Definition(module, name)
        there = self._modules[module].imported[name]
        if there.name not in self._modules[there.module].own:
            raise KeyError(there)
        return there

    def of_module(self, module: str, imported: str, name: str) -> _Definition:
        """Resolve a name of a module that `module` imports; KeyError as above."""
        package = self._modules[module].imported[imported]
        there = f"{package.module}.{package.name}"
        return self.resolve(there, name)

    def named(self, module: str, name: str) -> _Definition:
        """Resolve a name of a module, or else find its only definition; KeyError: there is none."""
        try:
            return self.resolve(module, name)
        except KeyError:
            return self.find(name)

    def reached(
        self, starts: list[_Definition], cut: Iterable[_Definition] = ()
    ) -> set[_Definition]:
        """`starts`, what they run, what that runs and so on, but nothing only through `cut`."""
        found: set[_Definition] = set()
        waiting = [*starts]
        while waiting:
            one = waiting.pop()
            if one not in found and one not in cut:
                found.add(one)
                waiting += self._runs(one)
        return found

    def _runs(self, one: _Definition) -> Iterator[_Definition]:
        for node in ast.walk(self._modules[one.module].own[one.name]):
            try:
                if isinstance(node, ast.Name):
                    yield self.resolve(one.module, node.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    yield self.of_module(one.module, node.value.id, node.attr)
            except KeyError:  # a variable, or another package's
                continue

    def lines(self, one: _Definition) -> Lines:
        module = self._modules[one.module]
        node = module.own[one.name]
        return Lines(str(module.file), node.lineno, node.end_lineno or node.lineno)


def _name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
