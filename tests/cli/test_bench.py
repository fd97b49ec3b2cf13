"""`flashdsa bench`: files written, the JSON on stdout, sizes that reach the run, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import Result

from flashdsa.bench import cases, runner
from flashdsa.bench import timer as timing
from flashdsa.bench.cases import Verdict
from flashdsa.bench.result import parse_result, read_result
from flashdsa.cli.bench import duration

Run = Callable[..., Result]
TINY = ("--s", "2", "--s-kv", "128", "--h", "2", "--topk", "32", "--repeats", "1")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample lasts, and the ceiling's buffer is small."""
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setitem(cases.READ_BYTES, "cpu", 1 << 20)


def test_json_on_stdout_is_the_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = run("bench", "topk", *TINY, "--seed", "3", "--out", str(path), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert parse_result(document) == read_result(path)
    (row,) = document["rows"]
    assert row["problem"] == {"s": 2, "s_kv": 128, "h": 2, "topk": 32, "dtype": "float32"}
    assert document["seed"] == 3
    assert path.with_suffix(".png").stat().st_size > 1000


def test_text_shows_the_share_and_where_the_files_are(run: Run, tmp_path: Path) -> None:
    result = run("bench", "sparse_mla_fwd", *TINY, "--dtype", "bfloat16", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    for part in ("of ceiling", "FLOPS", "bfloat16", "torch.matmul", "result:", "chart:"):
        assert part in result.output
    (path,) = tmp_path.glob("*-sparse_mla_fwd.json")
    assert read_result(path).rows[0].problem["dtype"] == "bfloat16"
    assert list(tmp_path.glob("*-sparse_mla_fwd.png"))


@pytest.mark.slow
def test_quick_measures_every_operation_of_a_cpu(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert run("bench", "--quick", "--out", str(path)).exit_code == 0
    result = read_result(path)
    assert [row.operation for row in result.rows] == [
        "sparse_mla_fwd",
        "mla_bwd",
        "indexer",
        "topk",
    ]
    assert {row.problem["s_kv"] for row in result.rows} == {1024}
    assert {row.problem["s"] for row in result.memory} == {1, 4}


@pytest.mark.parametrize("target", ["sparse_mla_decode", "indexer_training"])
def test_what_runs_on_gpus_runs_on_a_cpu_too(run: Run, tmp_path: Path, target: str) -> None:
    path = tmp_path / "result.json"
    result = run("bench", target, "--quick", "--out", str(path))
    assert result.exit_code == 0, result.output
    assert all(row.operation == target for row in read_result(path).rows)


def test_a_wrong_result_is_exit_code_1(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topk = runner.OPERATIONS["topk"]

    def make(*arguments: object) -> object:
        task = topk.make(*arguments)  # type: ignore[arg-type]
        return replace(task, judge=lambda _: Verdict({}, ["it is wrong"]))

    monkeypatch.setitem(runner.OPERATIONS, "topk", replace(topk, make=make))  # type: ignore[arg-type]
    path = tmp_path / "result.json"
    result = run("bench", "topk", *TINY, "--out", str(path))
    assert result.exit_code == 1
    assert "flashdsa is WRONG: it is wrong [every case]" in result.output
    assert read_result(path).wrong


def test_an_output_that_cannot_be_written_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = run("bench", "topk", *TINY, "--out", str(tmp_path / "file" / "result.json"))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert str(tmp_path) in line


def test_an_unknown_target_names_the_known_ones(run: Run) -> None:
    result = run("bench", "nothing")
    assert result.exit_code == 2 and "'mla_bwd'" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_one_line_says_what_is_missing(run: Run) -> None:
    result = run("bench", "indexer", "--backend", "sm90")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "needs a GPU of compute capability 9.0; found no GPU" in line


def test_memory_is_of_the_cpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdsa.cli.availability.require_runnable", lambda _: None)
    result = run("bench", "memory", "--backend", "sm90")
    assert result.exit_code == 2 and "use --backend cpu" in result.stderr


def test_durations_have_units() -> None:
    assert [duration(us) for us in (11.71, 0.5, 3805.2, 2e6)] == [
        "11.7 us", "0.5 us", "3.805 ms", "2 s",
    ]  # fmt: skip
