"""`bench indexer_training` on a GPU, run on the CPU with a pretended clock: rows and judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from flashdsa.bench.gpu.beside_flash_mla import OURS
from flashdsa.bench.gpu.bursts import BurstTimes
from flashdsa.bench.gpu.forward_cases import RANDOM
from flashdsa.bench.gpu.training import (
    TrainingBenchResult,
    read_training_result,
    run_training_bench,
)
from flashdsa.bench.gpu.training_cases import (
    STEPS,
    TRAINING_CASES,
    TrainingCase,
    TrainingInputs,
)
from flashdsa.cli.bench_training import print_training_result

JUDGED = [name for name in STEPS if name != "all"]


class Clock:
    """Calls everything once; a call takes 2 and 4 ms."""

    def in_turns(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, BurstTimes]:
        """Fixed times."""
        for call in calls.values():
            call()
        return {OURS: BurstTimes(2.0, 4.0)}


def small(what: str) -> TrainingCase:
    return TrainingCase(what, what, 4, RANDOM, queries=5, topk=16)


def run(*cases: TrainingCase) -> TrainingBenchResult:
    return run_training_bench(cases, Clock(), device="cpu", backend="cpu")


def test_rows_are_judged_and_count_what_slots_ask_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(*map(small, STEPS))
    assert [row.findings for row in result.rows] == [[]] * len(STEPS)
    rates = {row.name: row.hot_tflops * 4e9 / (5 * 16) for row in result.rows}
    of_all = 4 * 1152 + 4 * 64 * 256
    expected = {"target": 4 * 1152, "scores": 4 * 256, "backward": 12 * 256, "all": of_all}
    assert rates == pytest.approx({"divergence": 0, "gradient": 0, **expected})
    assert set(result.rows[list(STEPS).index("backward")].errors) == {"dQ", "dW", "dK"}
    path = tmp_path / "training.json"
    path.write_text(result.to_json())
    assert read_training_result(path) == result
    print_training_result(result)
    assert "4.000" in capsys.readouterr().out


@pytest.mark.parametrize("what", JUDGED)
def test_a_wrong_result_is_a_finding(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = STEPS[what].run

    def wrong(inputs: TrainingInputs, backend: str) -> object:
        found = right(inputs, backend)
        return tuple(1.02 * one for one in found) if isinstance(found, tuple) else 1.02 * found

    monkeypatch.setitem(STEPS, what, STEPS[what]._replace(run=wrong))
    (row,) = run(small(what)).rows
    wanted = len(row.errors) if what != "backward" else 2  # of dK the sum is judged: see dQ, dW
    assert len(row.findings) >= wanted and "is off by" in row.findings[0]


def test_a_wrong_key_gradient_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    right = STEPS["backward"].run

    def wrong(inputs: TrainingInputs, backend: str) -> object:
        dq, dk, dw = right(inputs, backend)
        return dq, 2 * dk, dw

    monkeypatch.setitem(STEPS, "backward", STEPS["backward"]._replace(run=wrong))
    (row,) = run(small("backward")).rows
    assert [finding.split()[0] for finding in row.findings] == ["dK"]


def test_cases_have_names_of_their_own_and_a_step() -> None:
    assert len({case.name for case in TRAINING_CASES}) == len(TRAINING_CASES)
    assert {case.what for case in TRAINING_CASES} == set(STEPS)
    assert TRAINING_CASES[0].quick().topk == 256
