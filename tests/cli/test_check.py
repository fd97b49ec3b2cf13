"""`flashdsa check`: its table, its JSON, its exit code when a row fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import Result

import flashdsa.verify.check
from flashdsa.ops import OPERATIONS
from flashdsa.verify import launch_list
from flashdsa.verify.check import CheckRow
from flashdsa.verify.check_list import COMPOSED

Run = Callable[..., Result]


def some_rows(passed: bool = True, error: float = 1e-3) -> list[CheckRow]:
    return [
        CheckRow(
            "mla_bwd", "a case", "dQ", error, 2.5e-3, passed, 0.1, "dQ: far off" * (not passed)
        ),
        CheckRow("topk_indices", "another", "positions", 0.0, 0.0, True, 0.1, ""),
    ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the checks; holds what they were asked for. Set "rows" to change their result."""
    asked: dict[str, Any] = {"rows": some_rows()}

    def fake(**keywords: Any) -> list[CheckRow]:
        asked.update(keywords)
        rows: list[CheckRow] = asked["rows"]
        return rows

    monkeypatch.setattr(flashdsa.verify.check, "run_checks", fake)
    return asked


def test_help_lists_the_operations(run: Run) -> None:
    words = run("check", "--help").output.split()
    assert {*OPERATIONS, *COMPOSED, "sparse_mla", "indexer_kl_loss"} <= set(words)


def test_another_name_is_refused_with_those_that_are_near(run: Run) -> None:
    for name, near in (
        ("sparse_mla_fw", "sparse_mla_fwd or sparse_mla"),
        ("bwd_mla", "one of check --help's list"),
    ):
        result = run("check", "--operation", name)
        assert result.exit_code == 2
        assert f"{name!r} is no operation; did you mean {near}" in result.stderr


def test_a_real_check_passes(run: Run) -> None:
    result = run("check", "--operation", "quantize_index_k", "--operation", "topk_indices")
    assert result.exit_code == 0
    assert re.search(r"all \d+ within their limits, in \d+\.\d s\n", result.output)
    assert "seed" in result.output


def test_options_reach_the_checks_and_the_seed_is_fresh(run: Run, asked: dict[str, Any]) -> None:
    document = json.loads(run("check", "--json", "--operation", "mla_bwd").stdout)
    assert asked["operations"] == ("mla_bwd",)
    assert (asked["backend"], document["seed"]) == ("cpu", asked["seed"])
    again = json.loads(run("check", "--json").stdout)
    assert asked["operations"] is None
    assert again["seed"] != document["seed"]
    assert json.loads(run("check", "--json", "--seed", "7").stdout)["seed"] == 7


def test_json_is_the_rows(run: Run, asked: dict[str, Any]) -> None:
    document = json.loads(run("check", "--json").stdout)
    assert document["failed"] == 0 and 0 <= document["seconds"] < 60
    assert document["rows"][0]["operation"] == "mla_bwd"
    assert document["rows"][0]["error"] == 1e-3


def test_a_failed_row_gives_exit_code_1_and_how_to_repeat_it(
    run: Run, asked: dict[str, Any]
) -> None:
    asked["rows"] = some_rows(passed=False)
    result = run("check", "--seed", "5")
    assert result.exit_code == 1
    assert "FAILED" in result.output and "dQ: far off" in result.output
    again = r"1 of 2 failed, in \d+\.\d s; repeat with: flashdsa check --backend cpu --seed 5\n"
    assert re.search(again, result.output)


def test_nan_is_still_json(run: Run, asked: dict[str, Any]) -> None:
    asked["rows"] = some_rows(passed=False, error=float("nan"))
    result = run("check", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout, parse_constant=pytest.fail)["rows"][0]["error"] == "nan"


def test_quick_reaches_the_checks(run: Run, asked: dict[str, Any]) -> None:
    run("check", "--quick")
    assert asked["quick"] is True


def test_the_list_says_which_case_reaches_which_kernel_and_runs_nothing(
    run: Run, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    every, names = launch_list.checks_of, ("530 queries", "fp64", "3 parts, bf16")
    monkeypatch.setattr(
        launch_list, "checks_of", lambda *given: [one for one in every(*given) if one.case in names]
    )
    wanted = ("--operation", "sparse_mla_fwd", "--operation", "merge_attention")
    result = run("check", "--list", "--backend", "sm90", *wanted)
    assert result.exit_code == 0 and "operations" not in asked
    lines = [line.split() for line in result.output.splitlines()]
    assert ["530", "queries", "mla_fwd", "mla_fwd"] in lines
    assert ["fp64", "not", "taken"] in lines
    assert ["3", "parts,", "bf16", "torch"] in lines
    document = json.loads(run("check", "--list", "--json", *wanted).stdout)
    assert document["backend"] == "cpu" and document["cases"][0]["functions"] == [
        "flashdsa.backends.cpu.sparse_mla:forward"
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cpu", "cuda"), "'cpu' takes cpu here; got cuda; only --backend torch leaves a"),
        (("sm90", "cpu"), "'sm90' takes cuda here; got cpu; only --backend torch leaves a"),
        (("emulate-triton", "cuda"), "'emulate-triton' takes cpu here; got cuda; only"),
        (("torch", "mps"), "'torch' takes cpu or xpu here; got mps\n"),
        (("cpu", "cpu"), None),
        (("sm90", "cuda"), None),
        (("triton", "cuda"), None),
        (("emulate-sm100", "cpu"), None),
        (("torch", "cpu"), None),
        (("torch", "xpu"), None),
    ],
)
def test_a_device_is_one_that_the_backend_runs_on(
    run: Run,
    words: tuple[str, str],
    said: str | None,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flashdsa.cli.availability.require_runnable", lambda backend: None)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("xpu"))
    result = run("check", "--backend", words[0], "--device", words[1])
    assert result.exit_code == (0 if said is None else 2)
    assert f"--device: backend {said}" in result.stderr if said else asked["device"] == words[1]
