"""Where a command is to write is tried before it begins, and nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ptxemu.cli.main import main

OUTPUTS = {
    "exec --json": "x.json",
    "exec --junit": "x.xml",
    "exec --sarif": "x.sarif",
    "exec --save": "launches",
    "check --junit": "x.xml",
    "check --sarif": "x.sarif",
    "check --save": "launches",
    "trace --out": "trace",
    "mutate --json": "x.json",
}


@pytest.mark.parametrize("command", OUTPUTS)
def test_a_path_that_cannot_be_written(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("as it was")
    name, option = command.split()
    with pytest.raises(SystemExit) as stop:
        main([name, option, str(in_the_way / OUTPUTS[command]), "no_such_program"])
    assert stop.value.code == 2
    assert f"argument {option}: cannot write" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["file"]
