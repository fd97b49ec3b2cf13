"""The numbers of the architectures have one home."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import flashdsa
from flashdsa import hw
from flashdsa.hw import SM90, SM100

SOURCES = Path(flashdsa.__file__).parent
NUMBERS = {name for name in vars(hw) if name.isupper() and not name.startswith("_")}


def test_the_size_of_shared_memory_stands_once() -> None:
    text = "\n".join(path.read_text() for path in SOURCES.rglob("*.py"))
    assert len(re.findall("232_?448", text)) == 1
    assert SM90.smem_bytes == SM100.smem_bytes == 227 * 1024


def test_nobody_else_gives_a_name_of_hw_a_number() -> None:
    found = [
        f"{path.relative_to(SOURCES)}: {name.id}"
        for path in sorted(set(SOURCES.rglob("*.py")) - {Path(hw.__file__)})
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for name in node.targets
        if isinstance(name, ast.Name) and name.id in NUMBERS
    ]
    assert found == []
