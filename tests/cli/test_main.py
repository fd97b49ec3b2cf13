"""The command's own options, its errors, and the files that it writes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import flashdsa
from flashdsa.cli import main
from flashdsa.cli.main import cli
from flashdsa.cli.moved import MOVED
from flashdsa.cli.output_options import JsonOrFolder, OutputFile, OutputFolder
from flashdsa.errors import ArgumentValueError
from flashdsa.output_paths import require_creatable, require_creatable_folder, written
from tests.support.full_disk import full_disk
from tests.support.subtests import CaseLoop

COMMANDS = (
    "info", "check", "bench", "choose sparse_mla",
    "choose mla_bwd", "choose dsa_topk_indexer", "choose dsa_topk_prefill",
    "choose attention_target", "choose indexer_scores", "choose indexer_bwd",
)  # fmt: skip
Run = Callable[..., Result]


def names_of(group: click.Group) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from (f"{name} {below}" for below in names_of(command))
        else:
            yield name


def test_the_list_above_is_complete() -> None:
    assert set(COMMANDS) == set(names_of(main.cli))


def test_help_teaches(subtests: CaseLoop, run: Run) -> None:
    for command in COMMANDS:
        with subtests.test(command):
            result = run(*command.split(), "--help")
            assert result.exit_code == 0
            for part in ("Examples", f"flashdsa {command}", "--json"):
                assert part in result.output
            assert max(len(line) for line in result.output.splitlines()) <= 80


def test_the_examples_of_help_are_commands_that_are_taken(subtests: CaseLoop, run: Run) -> None:
    for command in COMMANDS:
        with subtests.test(command):
            examples = re.findall(
                r"^ *flashdsa (.+)$",
                run(*command.split(), "--help").output.split("Examples")[1],
                re.M,
            )
            assert examples
            for example in examples:
                words = shlex.split(re.split(r"[|>]|  ", example)[0])
                group: click.Command = main.cli
                context = click.Context(group)
                while isinstance(group, click.Group):
                    name, group, words = group.resolve_command(context, words)
                    context = click.Context(group, parent=context, info_name=name)
                # Raises for an option or a value that there is not; runs nothing.
                group.make_context(group.name, list(words), parent=context.parent)


def test_top_help_names_every_command_and_the_exit_codes(run: Run) -> None:
    output = run("--help").output
    assert all(f"flashdsa {command.split()[0]}" in output for command in COMMANDS)
    assert "Exit codes" in output


@pytest.mark.parametrize(("name", "now"), MOVED.items())
def test_a_command_that_moved_says_where_to(run: Run, name: str, now: str) -> None:
    """Whatever its arguments were, and no help shows it."""
    for arguments in ((), ("--help",), ("mla_bwd", "--json", "--picture", "x.png")):
        result = run(name, *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith("flashdsa: error: ") and line.endswith(f"run: {now}")
    module = now.split()[2]
    assert find_spec(module) is not None
    assert f"flashdsa {name}" not in run("--help").output


def test_version(run: Run) -> None:
    assert run("--version").output == f"flashdsa {flashdsa.__version__}\n"


@pytest.mark.parametrize(
    "error",
    [
        ArgumentValueError("q: expected\n  shape"),
        ValueError("q: expected shape"),
        OSError(13, "q: expected shape"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(main.cli.commands["info"], "callback", fail)
    result = run("info")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("flashdsa: error: ") and "q: expected shape" in line


def test_a_bug_is_not_dressed_up_as_a_user_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.cli.commands["info"], "callback", lambda **_: {}["missing"])
    assert isinstance(run("info").exception, KeyError)


@pytest.mark.parametrize("command", ["check", "bench"])
def test_a_backend_that_cannot_run_is_one_line(run: Run, command: str) -> None:
    result = run(command, "--backend", "sm100")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert "sm100" in line
    assert any(why in line for why in ("available: cpu", "needs a GPU", "device: takes cuda"))


def test_an_unknown_setting_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHDSA_BACKEND", "abacus")
    result = run("info")
    assert result.exit_code == 2
    assert "FLASHDSA_BACKEND: expected one of auto, cpu" in result.stderr


def test_python_m_starts_quickly_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['flashdsa', '--help']\n"
        "import atexit, runpy\n"
        "atexit.register(lambda: print('TORCH' if 'torch' in sys.modules else 'LEAN'))\n"
        "runpy.run_module('flashdsa', run_name='__main__')"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: flashdsa") and done.stdout.endswith("LEAN\n")
    # A loaded machine may be slow; importing torch takes more than this on its own there.
    assert time.perf_counter() - start < 5


def test_an_interrupted_command_has_an_exit_code_of_its_own(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main.cli.commands["info"], "callback", stop)
    result = run("info")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "flashdsa: interrupted\n")
    assert "130 interrupted" in run("--help").stdout


PLACES = [("bench --quick --out", "x.json"), ("bench --quick --out", "results")]


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
    assert {p.opts[0] for p in outputs} == {command.split()[-1] for command, _ in PLACES}


def refused(arguments: str, match: str) -> None:
    begun = time.monotonic()
    result = CliRunner().invoke(cli, arguments.split())
    assert result.exit_code == 2, result.output
    assert match in result.output and len(result.output.splitlines()) == 1
    assert time.monotonic() - begun < 10  # nothing was trained, timed or assembled


@pytest.mark.parametrize(("command", "name"), PLACES)
def test_a_file_or_folder_that_cannot_be_written(command: str, name: str, tmp_path: Path) -> None:
    option = command.split()[-1]
    in_the_way = tmp_path / "file"
    in_the_way.write_text("as it was")
    refused(f"{command} {in_the_way / name}", f"{option}: cannot write ")
    refused(f"{command} /proc/nope/{name}", f"{option}: cannot write ")
    assert in_the_way.read_text() == "as it was" and os.listdir(tmp_path) == ["file"]


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


def test_a_full_disk_names_the_file_and_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashdsa.bench.timer.SAMPLE_SECONDS", 0.0)
    path = tmp_path / "x.json"
    path.write_text("as it was")
    command = "bench topk --s 2 --s-kv 128 --h 2 --topk 32 --repeats 1 --out"
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


def test_two_containers_write_drafts_of_their_own(tmp_path: Path) -> None:
    """Each one's process may have the number 1; both write the same file here."""
    with written(tmp_path / "out") as first, written(tmp_path / "out") as second:
        first.write_text("first")
        second.write_text("second")
        assert first != second and first.name.endswith("-out")
    assert (tmp_path / "out").read_text() == "first"  # the last to end
    assert os.listdir(tmp_path) == ["out"]
