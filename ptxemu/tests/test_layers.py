"""Arrows between ptxemu's packages that import-linter's contracts leave out."""

from __future__ import annotations

import re
from pathlib import Path

import ptxemu

PACKAGE = Path(ptxemu.__file__).parent


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
