"""What every command has in common: help, version, one-line errors, quick start."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import click
import pytest
from click.testing import Result

import flashdsa
from flashdsa.cli import main
from flashdsa.errors import ArgumentValueError
from flashdsa.kernels.catalog import KERNELS
from tests.support.subtests import CaseLoop

COMMANDS = (
    "demo", "info", "check", "bench", "choose sparse_mla",
    "choose mla_bwd", "choose dsa_topk_indexer",
    *(f"plan {spec.name}" for spec in KERNELS if spec.plans[0].roles), "inspect",
)  # fmt: skip
Run = Callable[..., Result]


def names_of(group: click.Group) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
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


@pytest.mark.parametrize("command", ["check", "bench", "demo"])
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
