"""The page of the five documents: commands run and show their rows; tests that it names exist."""

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
PAGE = (ROOT / "workbench/FIVE_DOCUMENTS.md").read_text()
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
SHOWN = {
    "flashdsa check --backend emulate-sm100 --operation mla_bwd": "2048 of 8192 keys",
    "flashdsa check --backend emulate-sm100 --operation dsa_topk_indexer": "3 rows, bound",
    "python -m workbench inspect mla_bwd --arch sm_100a": "spill",
    "python -m workbench plan indexer --arch sm_100a": "list: sortable scores",
    "python -m workbench plan indexer --arch sm_100a --gathers": "gathers True",
    "python -m workbench plan mla_bwd --arch sm_100a": "adds dKV to global memory",
    "python -m workbench export flashinfer-bench": "solutions/",
    "python -m workbench lab hazards --only threads": "unordered-mma",
    "python -m workbench lab majorness": "2.861e-06",
    "python -m workbench lab majorness --no-boundary": "2.861e-06",
    "python -m workbench lab split-heads": "dQ",
    "python -m workbench model attention": "red.global from registers",
    "python -m workbench ranking --rows 2 --tokens 4096": "4,096",
    "python -m workbench reference": "194,208 of 232,448 bytes",
    "python -m workbench reference --keys 64": "dO [480, 608) ends behind the 512 columns",
}
"""What a command prints that its row is about."""
PROGRAMS = {"flashdsa": cli, "python -m workbench": workbench}


def in_this_process(command: str) -> str:
    """Run a command of ours; return what it prints."""
    program = next(name for name in PROGRAMS if command.startswith(f"{name} "))
    arguments = command.removeprefix(program).split()
    result = CliRunner().invoke(PROGRAMS[program], arguments)
    assert result.exit_code == 0 and result.output, result.output
    return result.output


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Emulated GPUs have few SMs."""
    pytest.importorskip("cutlass")
    assert not re.search(r"--help|--quick", command)  # one case of many, or none
    monkeypatch.chdir(tmp_path)
    for backend in DEVICES:
        monkeypatch.setitem(DEVICES, backend, SMALL)
    assert SHOWN[command] in in_this_process(command)


def test_tests_are_there() -> None:
    named = {name for row in ROWS for name in re.findall(r"`((?:workbench/)?tests/[^`]+)`", row[2])}
    assert named and all((ROOT / name).exists() for name in named)
    functions = {name for row in ROWS for name in re.findall(r"`(test_\w+)`", row[2])}
    files = [ROOT / name for name in named if name.endswith(".py")]
    text = "".join(file.read_text() for file in files)
    assert functions and all(f"def {name}(" in text for name in functions)
