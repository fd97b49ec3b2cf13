"""One run of `bench indexer_training` on a GPU: every case judged and timed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdsa.bench.document import parse_fields
from flashdsa.bench.gpu.beside_flash_mla import OURS
from flashdsa.bench.gpu.bursts import BURSTS, HOT_ROUNDS, HOT_SECONDS, PAUSE_SECONDS, BurstTimes
from flashdsa.bench.gpu.run import GpuRun, OnProgress, read_run, run_cases
from flashdsa.bench.gpu.training_cases import STEPS, TrainingCase, make_training_inputs
from flashdsa.bench.gpu.turns import TurnsTimer

TRAINING_SCHEMA = "flashdsa-training-bench/1"
TRAINING_PROTOCOL = (
    f"burst: median of {BURSTS} calls, each behind {PAUSE_SECONDS * 1000:.0f} ms of idling, from "
    "an event before the Python call to one behind it, host time included; hot: median of "
    f"{HOT_ROUNDS} rounds, each the mean of {HOT_SECONDS:g} s back to back behind half as much "
    "warm-up; CUDA events; results of three queries against float64"
)


@dataclass(frozen=True)
class TrainingRow:
    """One case: its times, and what the results are worth."""

    name: str
    heads: int
    queries: int
    topk: int
    num_keys: int
    burst_ms: float
    hot_ms: float
    hot_tflops: float
    """Of the products that slots ask for; 0 where there are none."""
    errors: dict[str, float]
    """Of the results' norms, against float64."""
    findings: list[str]
    """What is wrong with our results; empty: nothing."""


TrainingBenchResult = GpuRun[TrainingRow]


def run_training_bench(
    cases: Iterable[TrainingCase],
    timer: TurnsTimer[BurstTimes],
    on_progress: OnProgress = lambda *_: None,
    *,
    device: str = "cuda",
    backend: str = "sm90",
) -> TrainingBenchResult:
    """Judge and time every case.

    Args:
        device, backend: of our calls.
    """
    return run_cases(
        cases,
        lambda case: _row(case, timer, device, backend),
        on_progress,
        protocol=TRAINING_PROTOCOL,
        schema=TRAINING_SCHEMA,
        device=device,
    )


def _row(
    case: TrainingCase, timer: TurnsTimer[BurstTimes], device: str, backend: str
) -> TrainingRow:
    inputs, step = make_training_inputs(case, device), STEPS[case.what]
    times = timer.in_turns({OURS: lambda: step.run(inputs, backend)})[OURS]
    judged = step.judge(inputs, step.run(inputs, backend))
    flop = step.flop(case) * case.queries * case.topk
    return TrainingRow(
        name=case.name,
        heads=case.heads,
        queries=case.queries,
        topk=case.topk,
        num_keys=case.of_slots.num_keys,
        burst_ms=times.burst_ms,
        hot_ms=times.hot_ms,
        hot_tflops=flop / times.hot_ms / 1e9,
        errors={one.name: one.error for one in judged},
        findings=[
            f"{one.name} is off by {one.error:.2e} of its norm, {one.limit:.0e} allowed"
            for one in judged
            if not one.error <= one.limit
        ],
    )


def read_training_result(path: Path) -> TrainingBenchResult:
    """The document in a file.

    Raises:
        ArgumentValueError: the file is no result file of this schema.
    """

    def parse_row(row: Any, at: str) -> TrainingRow:
        parsed: TrainingRow = parse_fields(row, TrainingRow, at)
        return parsed

    return read_run(path, TRAINING_SCHEMA, parse_row)
