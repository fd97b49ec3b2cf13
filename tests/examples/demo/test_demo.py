"""`python -m examples.demo`: its text, its JSON, its exit codes, and that options reach the run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from examples.demo import run as runs
from examples.demo.command import demo
from examples.demo.run import SIZES, V4_SIZES, run_demo
from examples.demo.train import DemoOptions
from tests.support.full_disk import full_disk

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """`run("--json")` is `python -m examples.demo --json`."""
    return lambda *arguments: CliRunner().invoke(demo, list(arguments))


@pytest.fixture(scope="module")
def short_result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A real run, as short as can be."""
    picture = tmp_path_factory.mktemp("demo") / "picture.png"
    options = DemoOptions(
        steps=1, window=192, num_queries=8, topk=64, num_heads=1, eval_windows=1, picture=picture
    )
    return run_demo(options)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, short_result: dict[str, Any]) -> list[DemoOptions]:
    """Replaces the run by the short one; holds the options that it was asked for."""
    asked: list[DemoOptions] = []

    def fake(options: DemoOptions, on_progress: Callable[[int, int, str], None]) -> dict[str, Any]:
        asked.append(options)
        on_progress(1, 1, "done")
        return short_result

    monkeypatch.setattr(runs, "run_demo", fake)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return asked


def test_text_tells_the_story(
    run: Run, asked: list[DemoOptions], short_result: dict[str, Any]
) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    for part in ("1 steps on the CPU", "of at most 192 keys", "sparse dense", "served by cpu: "):
        assert part in words
    assert f"picture: {short_result['options']['picture']}" in result.output
    lines = [line for line in result.output.splitlines() if not line.startswith("picture")]
    assert max(map(len, lines)) <= 100


def test_json_is_one_document(run: Run, asked: list[DemoOptions]) -> None:
    document = json.loads(run("--json").stdout)
    assert document["options"]["topk"] == 64
    assert [look["step"] for look in document["held_out"]] == [0, 1]
    assert len(document["steps"]) == 1


def test_defaults_are_those_of_the_library_and_options_reach_it(
    run: Run, asked: list[DemoOptions]
) -> None:
    run()
    run("--steps", "3", "--queries", "32", "--heads", "2", "--picture", "x.svg")
    run("--seed", "7", "--window", "999", "--topk", "99", "--indices", "x.pt")
    run("--form", "v4")
    run("--form", "v4", "--topk", "32")
    assert asked == [
        DemoOptions(),
        DemoOptions(steps=3, num_queries=32, num_heads=2, picture=Path("x.svg")),
        DemoOptions(seed=7, window=999, topk=99, indices=Path("x.pt")),
        DemoOptions(form="v4", topk=V4_SIZES["cpu"]["topk"]),
        DemoOptions(form="v4", topk=32),
    ]


def test_help_tells_the_sizes_of_both_devices(run: Run) -> None:
    text = " ".join(run("--help").output.split())
    for name in SIZES["cpu"]:
        assert f"[default: ({SIZES['cpu'][name]}, on a GPU {SIZES['cuda'][name]}" in text
    for sizes in V4_SIZES.values():
        other = {name: size for name, size in sizes.items() if size not in SIZES["cpu"].values()}
        assert all(str(size) in text for size in other.values())


def test_a_gpu_that_is_missing_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("--device", "cuda")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("flashdsa: error: device: expected auto or cpu")


def test_impossible_sizes_are_one_line(run: Run) -> None:
    result = run("--window", "64", "--queries", "16", "--topk", "64")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("flashdsa: error: topk: expected")


@pytest.mark.parametrize("option", ["--steps 0", "--heads 0", "--seed -1", "--steps 2.5"])
def test_numbers_out_of_range_name_their_option(run: Run, option: str) -> None:
    result = run(*option.split())
    assert result.exit_code == 2
    assert f"Invalid value for '{option.split()[0]}'" in result.output


def test_help_teaches_and_its_examples_are_taken(run: Run) -> None:
    text = run("--help").output
    assert max(map(len, text.splitlines())) <= 80 and "--json" in text
    examples = re.findall(r"^ *python -m examples.demo(.*)$", text.split("Examples")[1], re.M)
    assert len(examples) >= 3
    for example in examples:
        words = shlex.split(re.split(r"[|>]|  ", example)[0])
        demo.make_context("demo", words)  # raises for an unknown option or value


def test_help_needs_no_torch() -> None:
    """What torch reads must be set before it is imported."""
    code = "import sys, examples.demo.command; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_backend_that_cannot_run_is_one_line(run: Run) -> None:
    result = run("--backend", "sm100")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert "sm100" in line


TINY = ("--steps", "1", "--window", "192", "--queries", "8", "--topk", "64", "--heads", "1")


@pytest.mark.parametrize(("option", "name"), [("--picture", "x.png"), ("--indices", "x.pt")])
def test_a_file_that_cannot_be_written(
    run: Run, option: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything is trained; a full disk leaves what was there."""
    in_the_way, path = tmp_path / "file", tmp_path / name
    in_the_way.write_text("as it was")
    for place in (in_the_way / name, f"/proc/nope/{name}"):
        result = run(option, str(place))
        assert result.exit_code == 2 and f"{option}: cannot write " in result.output
    path.write_text("as it was")
    if option == "--indices":
        monkeypatch.setattr(runs, "draw_picture", lambda *_: None)
    with full_disk():
        result = run(*TINY, option, str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].endswith(f"File too large: '{path}'")
    assert {one.read_text() for one in tmp_path.iterdir()} == {"as it was"}


def test_a_picture_of_a_format_that_there_is_not(run: Run, tmp_path: Path) -> None:
    result = run("--picture", str(tmp_path / "x.bmpx"))
    assert result.exit_code == 2
    assert "--picture: expected a name ending in .png, .svg" in result.output
