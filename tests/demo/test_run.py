"""A short whole run: it learns, repeats itself exactly, and leaves a picture and plain data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flashdsa.demo import DemoOptions, DemoResult, run_demo
from flashdsa.demo.device import OPERATIONS

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
Report = list[tuple[int, int, str]]


def tiny(folder: Path, steps: int) -> DemoOptions:
    return DemoOptions(
        steps=steps,
        window=320,
        num_queries=96,
        topk=64,
        num_heads=2,
        batch=2,
        eval_every=8,
        eval_windows=2,
        picture=folder / "new" / "demo.png",
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResult, Report]:
    report: Report = []
    options = tiny(tmp_path_factory.mktemp("demo"), steps=16)
    return run_demo(options, lambda *event: report.append(event)), report


def test_losses_fall_and_sparse_stays_near_dense(run: tuple[DemoResult, Report]) -> None:
    result, _ = run
    first, last = result.steps[0].train_loss, result.steps[-1].train_loss
    assert last < first - 1.0
    assert result.after.sparse_loss < result.before.sparse_loss - 1.0
    assert abs(result.after.sparse_loss - result.after.dense_loss) < 0.1


def test_indexer_learns_to_find_the_mass(run: tuple[DemoResult, Report]) -> None:
    result, _ = run
    after = result.after.captured
    assert after.indexer > result.before.captured.indexer + 0.2
    assert after.random < after.indexer <= after.best <= 1.0 + 1e-6
    assert result.after_warm_up.step == 8
    assert after.indexer > result.after_warm_up.captured.indexer + 0.05


def test_every_operation_is_within_the_contract(run: tuple[DemoResult, Report]) -> None:
    result, _ = run
    outputs = {(row.operation, row.output) for row in result.errors}
    assert {("sparse_mla_fwd", "O"), ("sparse_mla_fwd", "lse")} <= outputs
    assert {("mla_bwd", "dQ"), ("mla_bwd", "dKV")} <= outputs
    assert [row for row in result.errors if not row.passed] == []
    assert result.passed


def test_picture_and_plain_data_are_written(run: tuple[DemoResult, Report]) -> None:
    result, _ = run
    assert Path(result.picture).read_bytes().startswith(PNG_SIGNATURE)
    plain = json.loads(json.dumps(result.to_json_dict()))
    assert plain["options"]["topk"] == 64
    assert len(plain["steps"]) == 16
    assert [row["operation"] for row in plain["served"]] == [one.value for one in OPERATIONS]
    assert {(row["backend"], *row["kernels"]) for row in plain["served"]} == {("cpu",)}
    assert [record["step"] for record in plain["held_out"]] == [0, 8, 16]


def test_progress_reaches_its_total(run: tuple[DemoResult, Report]) -> None:
    _, report = run
    done = [event[0] for event in report]
    totals = {event[1] for event in report}
    assert done == sorted(done)
    assert totals == {done[-1]}


def test_same_seed_same_losses_and_untouched_global_state(
    run: tuple[DemoResult, Report], tmp_path: Path
) -> None:
    state = torch.random.get_rng_state()
    again = [run_demo(tiny(tmp_path, steps=2)).steps for _ in range(2)]
    assert again[0] == again[1]
    assert torch.equal(state, torch.random.get_rng_state())


def test_window_longer_than_the_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"window: expected less than \d+ bytes"):
        run_demo(DemoOptions(window=10**9, picture=tmp_path / "demo.png"))
