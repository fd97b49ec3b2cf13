"""Common to the workbench's commands: help, examples, outputs tried before the work."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from flashdsa.cli.output_options import OutputFile, OutputFolder
from workbench.__main__ import cli

OUTPUTS = {
    "draws run forward --out": "x.json",
    "draws report x.json --chart": "x.png",
    "lab majorness --compile-to": "x.so",
    "lab majorness --picture": "x.png",
    "engines vllm --folder": "folder",
    "engines vllm --pack": "packed",
    "engines vllm --out": "x.json",
    "export flashinfer-bench --output": "solutions",
    "launch --save": "launches",
    "sanitize --build-controls": "controls",
    "sanitize --out": "x.json",
    "mutate --rows": "rows",
    "v4-layer --out": "x.json",
    "ways decode --out": "x.json",
}


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield path + name, command


def run(arguments: str) -> click.testing.Result:
    return CliRunner().invoke(cli, arguments.split())


def test_help_teaches_and_its_examples_are_taken() -> None:
    for name, command in commands(cli):
        text = run(f"{name} --help").output
        assert max(map(len, text.splitlines())) <= 80, name
        assert "--json" in text, name
        examples = re.findall(r"^ *python -m workbench (.+)$", text.split("Examples")[1], re.M)
        assert examples, name
        for example in examples:
            words = shlex.split(re.split(r"[|>]|  ", example)[0])[len(name.split()) :]
            command.make_context(name, words)  # raises for an unknown option or value


def test_every_output_is_tried_before_the_work(tmp_path: Path) -> None:
    parameters = [p for _, command in commands(cli) for p in command.params]
    outputs = [p for p in parameters if isinstance(p.type, OutputFile | OutputFolder)]
    assert len(outputs) == len(OUTPUTS)
    in_the_way = tmp_path / "file"
    in_the_way.write_text("as it was")
    for command, name in OUTPUTS.items():
        result = run(f"{command} {in_the_way / name}")
        assert result.exit_code == 2, command
        assert f"{command.split()[-1]}: cannot write " in result.output
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("arguments", ["model nothing", "lab hazards --only nothing"])
def test_a_wrong_input_is_one_line(arguments: str) -> None:
    result = run(arguments)
    assert (result.exit_code == 2 and "Error" in result.output) or "error" in result.output
