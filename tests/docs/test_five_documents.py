"""The page of the five documents: every command runs, every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashdsa.backends.emulated.devices import SMALL
from flashdsa.cli.main import cli
from flashdsa.verify.check import DEVICES
from workbench.__main__ import cli as workbench

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/concepts/five-documents.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| requirement", "| ---"))
]
SLOW = "check|inspect|split-heads|majorness|hazards"
"""Commands that compile and emulate what tests of the kernels and of the laboratory do."""
COMMANDS = [
    pytest.param(command, marks=pytest.mark.slow if re.search(SLOW, command) else ())
    for command in sorted({found for row in ROWS for found in re.findall("`([^`]+)`", row[1])})
]
PROGRAMS = {"flashdsa": cli, "python -m workbench": workbench}


def in_this_process(command: str) -> None:
    """Run a command of ours; it prints something."""
    program = next(name for name in PROGRAMS if command.startswith(f"{name} "))
    arguments = command.removeprefix(program).split()
    result = CliRunner().invoke(PROGRAMS[program], arguments)
    assert result.exit_code == 0 and result.output, result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated GPUs have few SMs."""
    pytest.importorskip("cutlass")
    for backend in DEVICES:
        monkeypatch.setitem(DEVICES, backend, SMALL)
    in_this_process(command)


def test_tests_are_there() -> None:
    named = {name for row in ROWS for name in re.findall(r"`((?:workbench/)?tests/[^`]+)`", row[2])}
    assert named and all((ROOT / name).exists() for name in named)
    functions = {name for row in ROWS for name in re.findall(r"`(test_\w+)`", row[2])}
    files = [ROOT / name for name in named if name.endswith(".py")]
    text = "".join(file.read_text() for file in files)
    assert functions and all(f"def {name}(" in text for name in functions)
