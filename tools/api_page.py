"""Writes the list of public functions in docs/reference/api.md from the files that hold them.

    python tools/api_page.py [--check]

The lines between `<!-- operations -->` and `<!-- /operations -->` are a heading for each file of
`flashdsa/ops` and a line for each function in its `__all__`, which mkdocstrings replaces by the
docstring. With --check nothing is written; exit code 1 if the list is old.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from flashdsa import ops

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"
BLOCK = re.compile(r"(<!-- operations -->\n).*?(<!-- /operations -->)", re.DOTALL)


def families() -> list[ModuleType]:
    """The modules that public functions are from, in the order of their names."""
    return [
        import_module(name) for name in sorted({getattr(ops, x).__module__ for x in ops.PUBLIC})
    ]


def functions(family: ModuleType) -> list[str]:
    """Its public functions in the order of the file."""
    return [name for name in vars(family) if name in family.__all__]


def section(family: ModuleType) -> str:
    """The family's heading, its docstring up to a colon, and its functions."""
    heading = re.split(r"[:.]", family.__doc__ or "")[0]
    lines = [f"::: {family.__name__}.{name}" for name in functions(family)]
    return "\n\n".join([f"## {heading}", *lines])


def updated(text: str) -> str:
    """The page with today's list."""
    new = "\n\n".join(map(section, families()))
    return BLOCK.sub(lambda block: f"{block[1]}\n{new}\n\n{block[2]}", text)


def main() -> int:
    """Write the page, or say whether it is old."""
    text = PAGE.read_text()
    new = updated(text)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(new)
        return 0
    return int(new != text)


if __name__ == "__main__":
    sys.exit(main())
