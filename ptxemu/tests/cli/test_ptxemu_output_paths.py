"""Where a command is to write is tried before it begins, and nothing is left behind."""

import os
import resource
import sys
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


def test_a_full_disk_names_the_file_and_leaves_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # compiled modules would end there, too
    kernel, out = tmp_path / "nothing.ptx", tmp_path / "out"
    kernel.write_text(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry nothing() { ret; }\n"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # bytes of a file
    try:
        code = main(["trace", str(kernel), "--grid", "1", "--block", "32", "--out", str(out)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert code == 2 and f"File too large: '{out}" in said
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kernel]
