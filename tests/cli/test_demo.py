"""`flashdsa demo`: its text, its JSON, its exit codes, and that options reach the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import flashdsa.demo
from flashdsa.demo import DemoOptions, run_demo
from flashdsa.demo.run import SIZES, V4_SIZES

Run = Callable[..., Result]


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

    monkeypatch.setattr(flashdsa.demo, "run_demo", fake)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return asked


def test_text_tells_the_story(
    run: Run, asked: list[DemoOptions], short_result: dict[str, Any]
) -> None:
    result = run("demo")
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    for part in ("1 steps on the CPU", "of at most 192 keys", "sparse dense", "served by cpu: "):
        assert part in words
    assert f"picture: {short_result['options']['picture']}" in result.output
    lines = [line for line in result.output.splitlines() if not line.startswith("picture")]
    assert max(map(len, lines)) <= 100


def test_json_is_one_document(run: Run, asked: list[DemoOptions]) -> None:
    document = json.loads(run("demo", "--json").stdout)
    assert document["options"]["topk"] == 64
    assert [look["step"] for look in document["held_out"]] == [0, 1]
    assert len(document["steps"]) == 1


def test_defaults_are_those_of_the_library_and_options_reach_it(
    run: Run, asked: list[DemoOptions]
) -> None:
    run("demo")
    run("demo", "--steps", "3", "--queries", "32", "--heads", "2", "--picture", "x.svg")
    run("demo", "--seed", "7", "--window", "999", "--topk", "99", "--indices", "x.pt")
    run("demo", "--form", "v4")
    run("demo", "--form", "v4", "--topk", "32")
    assert asked == [
        DemoOptions(),
        DemoOptions(steps=3, num_queries=32, num_heads=2, picture=Path("x.svg")),
        DemoOptions(seed=7, window=999, topk=99, indices=Path("x.pt")),
        DemoOptions(form="v4", topk=V4_SIZES["cpu"]["topk"]),
        DemoOptions(form="v4", topk=32),
    ]


def test_help_tells_the_sizes_of_both_devices(run: Run) -> None:
    text = " ".join(run("demo", "--help").output.split())
    for name in SIZES["cpu"]:
        assert f"[default: ({SIZES['cpu'][name]}, on a GPU {SIZES['cuda'][name]}" in text
    for sizes in V4_SIZES.values():
        other = {name: size for name, size in sizes.items() if size not in SIZES["cpu"].values()}
        assert all(str(size) in text for size in other.values())


def test_a_gpu_that_is_missing_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("demo", "--device", "cuda")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("flashdsa: error: device: expected auto or cpu")


def test_impossible_sizes_are_one_line(run: Run) -> None:
    result = run("demo", "--window", "64", "--queries", "16", "--topk", "64")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("flashdsa: error: topk: expected")


@pytest.mark.parametrize("option", ["--steps 0", "--heads 0", "--seed -1", "--steps 2.5"])
def test_numbers_out_of_range_name_their_option(run: Run, option: str) -> None:
    result = run("demo", *option.split())
    assert result.exit_code == 2
    assert f"Invalid value for '{option.split()[0]}'" in result.output
