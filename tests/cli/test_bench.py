"""`flashdsa bench`: files written, the JSON on stdout, sizes that reach the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result

from flashdsa.bench.result import parse_result, read_result
from flashdsa.cli.bench import _rate

Run = Callable[..., Result]
TINY = ("--s", "2", "--s-kv", "128", "--h", "2", "--topk", "32", "--repeats", "1")


def test_json_on_stdout_is_the_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = run("bench", "topk", *TINY, "--out", str(path), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert parse_result(document) == read_result(path)
    (row,) = document["rows"]
    assert row["problem"] == {"B": 2, "seq_len": 128, "topk": 32, "dtype": "float32"}
    assert path.with_suffix(".png").stat().st_size > 1000


def test_text_shows_the_ratio_and_where_the_files_are(run: Run, tmp_path: Path) -> None:
    result = run("bench", "sparse_mla_fwd", *TINY, "--dtype", "bfloat16", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    for part in ("of it", "GFLOPS", "bfloat16", "result:", "chart:"):
        assert part in result.output
    (path,) = tmp_path.glob("*-sparse_mla_fwd.json")
    assert read_result(path).rows[0].problem["dtype"] == "bfloat16"
    assert list(tmp_path.glob("*-sparse_mla_fwd.png"))


def test_quick_never_enlarges(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    run("bench", "topk", *TINY, "--quick", "--out", str(path))
    (row,) = read_result(path).rows
    assert (row.problem["B"], row.problem["seq_len"], row.repeats) == (2, 128, 1)


def test_an_output_that_cannot_be_written_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = run("bench", "topk", *TINY, "--out", str(tmp_path / "file" / "result.json"))
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert str(tmp_path) in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_one_line_says_what_is_missing(run: Run) -> None:
    result = run("bench", "indexer", "--backend", "sm90")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "needs a GPU of compute capability 9.0; found no GPU" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("all",),
            "measures indexer, sparse_mla_fwd, sparse_mla_decode, indexer_training in this "
            "version; got all",
        ),
        (("sparse_mla_fwd", "--repeats", "3"), "--repeats: the cases of --backend sm90 are fixed"),
        (("indexer", "--s-kv", "64"), "--s-kv: the cases of --backend sm90 are fixed"),
    ],
)
def test_on_a_gpu_cases_are_fixed(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("flashdsa.cli.availability.require_runnable", lambda _: None)
    result = run("bench", *arguments, "--backend", "sm90")
    assert result.exit_code == 2 and message in result.stderr


@pytest.mark.parametrize("target", ["sparse_mla_decode", "indexer_training"])
def test_some_are_measured_on_a_gpu_only(run: Run, target: str) -> None:
    result = run("bench", target)
    assert result.exit_code == 2 and "add --backend sm90" in result.stderr


def test_a_small_rate_is_not_0() -> None:
    assert [_rate(value) for value in (0.0123, 0.96, 1.04, 4445.0)] == [
        "0.012",
        "0.96",
        "1.0",
        "4445.0",
    ]
