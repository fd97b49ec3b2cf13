"""Arrows between ptxemu's packages that import-linter's contracts leave out."""

import ast
import re
from pathlib import Path

import ptxemu

PACKAGE = Path(ptxemu.__file__).parent
MODULES = {
    ".".join(("ptxemu", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in PACKAGE.rglob("*.py")
}


def test_the_machine_names_no_engine_not_even_in_a_type() -> None:
    """Engines know the machine; the contracts do not see imports under TYPE_CHECKING."""
    named = [
        f"{path.name}: {line.strip()}"
        for folder in ("machine", "memory")
        for path in sorted((PACKAGE / folder).glob("*.py"))
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import) ptxemu\.(engines|isa|sched|check|trace)\b", line)
    ]
    assert named == []


def test_no_module_is_in_a_circle_not_even_of_types() -> None:
    """Imports under TYPE_CHECKING count, as whoever reads a module follows those too."""
    arrows = {name: _imports(path) for name, path in MODULES.items()}
    assert _circle(arrows) == []


def _imports(path: Path) -> set[str]:
    """List the modules of ptxemu that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(names & MODULES.keys() or {node.module})
    return found & MODULES.keys()


def _circle(arrows: dict[str, set[str]]) -> list[str]:
    """Name the modules that are left when those at either end of all arrows are taken away."""
    left = dict(arrows)
    while left:
        needed = set().union(*left.values())
        ends = [
            name for name, needs in left.items() if name not in needed or not needs & left.keys()
        ]
        if not ends:
            break
        for name in ends:
            del left[name]
    return sorted(left)
