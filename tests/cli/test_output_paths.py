"""Where a command is to write is tried before it begins, and nothing is left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from flashdsa.cli.main import cli
from flashdsa.cli.output_options import JsonOrFolder, OutputFile, OutputFolder
from flashdsa.output_paths import require_creatable, require_creatable_folder

FILES = {
    "demo --picture": "x.png",
    "demo --indices": "x.pt",
    "bench --quick --out": "x.json",
    "plan mla_bwd --picture": "x.svg",
}
FOLDERS = {
    "bench --quick --out": "results",
}
PICTURES = [name for name, file in FILES.items() if not file.endswith((".pt", ".json"))]


def test_every_option_that_says_where_to_write_is_tried() -> None:
    """Every path of a command either is there already or is one of these types."""

    def paths(command: click.Command) -> list[click.Parameter]:
        found = [p for p in command.params if isinstance(p.type, click.Path)]
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                found += paths(inner)
        return found

    every = paths(cli)
    outputs = [p for p in every if isinstance(p.type, OutputFile | OutputFolder | JsonOrFolder)]
    inputs = {p.opts[0] for p in every if p not in outputs}
    assert inputs == set()
    assert len({p.opts[0] for p in outputs}) >= 3


def refused(arguments: str, match: str) -> None:
    begun = time.monotonic()
    result = CliRunner().invoke(cli, arguments.split())
    assert result.exit_code == 2, result.output
    assert match in result.output and len(result.output.splitlines()) == 1
    assert time.monotonic() - begun < 10  # nothing was trained, timed or assembled


@pytest.mark.parametrize("command", FILES)
def test_a_file_that_cannot_be_written(command: str, tmp_path: Path) -> None:
    option = command.split()[-1]
    in_the_way = tmp_path / "file"
    in_the_way.write_text("as it was")
    refused(f"{command} {in_the_way / FILES[command]}", f"{option}: cannot write ")
    refused(f"{command} /proc/nope/{FILES[command]}", f"{option}: cannot write ")
    assert in_the_way.read_text() == "as it was" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_that_cannot_be_written(command: str, tmp_path: Path) -> None:
    option = command.split()[-1]
    in_the_way = tmp_path / "file"
    in_the_way.write_text("as it was")
    refused(f"{command} {in_the_way / FOLDERS[command]}", f"{option}: cannot write ")
    refused(f"{command} /proc/nope", f"{option}: cannot write ")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("command", PICTURES)
def test_a_picture_of_a_format_that_there_is_not(command: str, tmp_path: Path) -> None:
    option = command.split()[-1]
    refused(f"{command} {tmp_path / 'x.bmpx'}", f"{option}: expected a name ending in .png, .svg")
    refused(f"{command} {tmp_path}/", f"{option}: expected a name ending in")


def test_the_default_place_of_results_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flashdsa.bench.runner.find_checkout", lambda: None)
    refused("bench --quick", "--out: cannot write 'out'")


def test_trying_leaves_everything_as_it_was(tmp_path: Path) -> None:
    held = tmp_path / "held.png"
    held.write_text("as it was")
    os.utime(held, (1, 1))
    require_creatable("picture", held, (".png",))
    require_creatable("picture", tmp_path / "new" / "folder" / "x.PNG", (".png",))
    require_creatable_folder("out", tmp_path / "new")
    require_creatable_folder("out", tmp_path)
    assert held.read_text() == "as it was" and held.stat().st_mtime == 1
    assert os.listdir(tmp_path) == ["held.png"]
