"""Where a command is to write is tried before it begins, and nothing is left behind."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from flashdsa.cli.main import cli
from flashdsa.cli.output_options import JsonOrFolder, OutputFile, OutputFolder
from flashdsa.errors import ArgumentValueError
from flashdsa.output_paths import require_creatable, require_creatable_folder, written

FILES = {
    "demo --picture": "x.png",
    "demo --indices": "x.pt",
    "bench --quick --out": "x.json",
    "plan mla_bwd --picture": "x.svg",
}
FOLDERS = {"bench --quick --out": "results"}
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


@contextmanager
def full_disk() -> Iterator[None]:
    """Files of this process end at 100 bytes; it keeps no bytecode, which would end, too."""
    limits, kept = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        sys.dont_write_bytecode = kept
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


TINY_DEMO = "demo --steps 1 --window 192 --queries 8 --topk 64 --heads 1"
WRITING = {
    f"{TINY_DEMO} --picture": "x.png",
    f"{TINY_DEMO} --indices": "x.pt",
    "bench topk --s 2 --s-kv 128 --h 2 --topk 32 --repeats 1 --out": "x.json",
    "plan mla_bwd --picture": "x.svg",
}


@pytest.mark.parametrize("command", WRITING, ids=lambda one: f"{one.split()[0]} {one.split()[-1]}")
def test_a_full_disk_names_the_file_and_leaves_all_as_it_was(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashdsa.bench.timer.SAMPLE_SECONDS", 0.0)
    if command.endswith("indices"):
        monkeypatch.setattr("flashdsa.demo.run.draw_picture", lambda *_: None)
    path = tmp_path / WRITING[command]
    path.write_text("as it was")
    with full_disk():
        result = CliRunner().invoke(cli, [*command.split(), str(path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].endswith(f"File too large: '{path}'")
    assert path.read_text() == "as it was" and os.listdir(tmp_path) == [path.name]


def test_a_file_in_a_folder_where_nothing_can_be_made_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match="out: cannot write"):
        require_creatable("out", Path("/proc/self/comm"))


def test_a_device_is_written_itself_and_a_link_stays_one(tmp_path: Path) -> None:
    full = written(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), full as draft:
        draft.write_text("more")
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    with written(link) as draft:
        draft.write_text("new")
    assert link.is_symlink() and target.read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]
