"""`flashdsa demo`: its text, its JSON, its exit codes, and that options reach the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

import flashdsa.demo
from flashdsa.demo import DemoOptions, DemoResult, run_demo
from flashdsa.demo.options import SIZES

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def short_result(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    """A real run, as short as can be."""
    picture = tmp_path_factory.mktemp("demo") / "picture.png"
    options = DemoOptions(
        steps=1, window=192, num_queries=8, topk=64, num_heads=1, eval_windows=1, picture=picture
    )
    return run_demo(options)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, short_result: DemoResult) -> list[DemoOptions]:
    """Replaces the run by the short one; holds the options that it was asked for."""
    asked: list[DemoOptions] = []

    def fake(options: DemoOptions, on_progress: Callable[[int, int, str], None]) -> DemoResult:
        asked.append(options)
        on_progress(1, 1, "done")
        return short_result

    monkeypatch.setattr(flashdsa.demo, "run_demo", fake)
    return asked


def test_text_tells_the_story(run: Run, asked: list[DemoOptions], short_result: DemoResult) -> None:
    result = run("demo")
    assert result.exit_code == 0, result.output
    for part in ("each query selects 64 of", "before training", "best possible", "float64", "dKV"):
        assert part in result.output
    assert f"picture: {short_result.picture}" in result.output
    lines = [line for line in result.output.splitlines() if not line.startswith("picture")]
    assert max(map(len, lines)) <= 100


def test_json_is_one_document(run: Run, asked: list[DemoOptions]) -> None:
    document = json.loads(run("demo", "--json").stdout)
    assert document["passed"] is True
    assert len(document["steps"]) == 1


def test_defaults_are_those_of_the_library_and_options_reach_it(
    run: Run, asked: list[DemoOptions]
) -> None:
    run("demo")
    run("demo", "--steps", "3", "--queries", "32", "--heads", "2", "--picture", "x.svg")
    assert asked == [
        DemoOptions(),
        DemoOptions(steps=3, num_queries=32, num_heads=2, picture=Path("x.svg")),
    ]


def test_help_tells_the_sizes_of_both_devices(run: Run) -> None:
    text = " ".join(run("demo", "--help").output.split())
    for name in SIZES["cpu"]:
        assert f"[default: ({SIZES['cpu'][name]}, on a GPU {SIZES['cuda'][name]})" in text


def test_what_served_each_operation_is_said(run: Run, asked: list[DemoOptions]) -> None:
    lines = run("demo").output.splitlines()
    (title,) = (number for number, line in enumerate(lines) if line == "Served by, on the CPU")
    rows = [line.split() for line in lines[title + 3 :]]
    assert rows[2] == ["dsa_topk_prefill", "cpu", "-"]
    assert ["indexer_kl_loss_dense", "torch", "-"] in rows


def test_a_gpu_that_is_not_there_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("demo", "--device", "cuda")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("flashdsa: error: device: expected auto or cpu")


def test_an_error_over_its_limit_is_exit_code_1(
    run: Run, monkeypatch: pytest.MonkeyPatch, short_result: DemoResult
) -> None:
    bad = replace(short_result, errors=(replace(short_result.errors[0], passed=False),))
    monkeypatch.setattr(flashdsa.demo, "run_demo", lambda *_: bad)
    result = run("demo")
    assert result.exit_code == 1
    assert "FAILED" in result.output


def test_impossible_sizes_are_one_line(run: Run) -> None:
    result = run("demo", "--window", "64", "--queries", "16", "--topk", "64")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("flashdsa: error: topk: expected")


def test_context_parallel_needs_torchrun(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = run("demo", "--context-parallel")
    assert result.exit_code == 2
    assert "runs on the CPU" in run("demo", "--context-parallel", "--device", "cuda").output
    assert "torchrun --nproc-per-node 2 -m flashdsa.demo --context-parallel" in result.output
