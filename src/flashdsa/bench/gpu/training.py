"""One run of `bench indexer_training` on a GPU: every case judged and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashdsa.bench.checkout import find_checkout
from flashdsa.bench.document import parse_fields, read_json, require_schema, to_json
from flashdsa.bench.gpu.device import clocks, describe_gpu, gpu_versions
from flashdsa.bench.gpu.forward import (
    BURSTS,
    HOT_ROUNDS,
    HOT_SECONDS,
    OURS,
    PAUSE_SECONDS,
    ForwardTimer,
)
from flashdsa.bench.gpu.training_cases import STEPS, TrainingCase, make_training_inputs

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


@dataclass(frozen=True)
class TrainingBenchResult:
    """Everything that one run found, and where it was found."""

    date: str
    git: dict[str, str | bool | None] | None
    gpu: dict[str, Any]
    versions: dict[str, str | None]
    protocol: str
    rows: list[TrainingRow] = field(default_factory=list)
    schema: str = TRAINING_SCHEMA

    def to_json(self) -> str:
        """The document as indented JSON text."""
        return to_json(self)


def run_training_bench(
    cases: Iterable[TrainingCase],
    timer: ForwardTimer,
    on_progress: Callable[[int, int, str], None] = lambda *_: None,
    *,
    device: str = "cuda",
    backend: str = "sm90",
) -> TrainingBenchResult:
    """Judge and time every case.

    Args:
        device, backend: of our calls.
    """
    chosen = list(cases)
    checkout = find_checkout()
    before = clocks()
    result = TrainingBenchResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        git=checkout.as_dict() if checkout else None,
        gpu=describe_gpu() if device == "cuda" else {"name": "none"},
        versions=gpu_versions(),
        protocol=TRAINING_PROTOCOL,
    )
    for done, case in enumerate(chosen):
        on_progress(done, len(chosen), case.name)
        result.rows.append(_row(case, timer, device, backend))
    on_progress(len(chosen), len(chosen), "done")
    result.gpu.update(clocks_before=before, clocks_after=clocks())
    return result


def _row(case: TrainingCase, timer: ForwardTimer, device: str, backend: str) -> TrainingRow:
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
    document, where = read_json(path), str(path)
    require_schema(document, TRAINING_SCHEMA, where)
    rows = [
        parse_fields(row, TrainingRow, f"{where}: rows[{number}]")
        for number, row in enumerate(document["rows"])
    ]
    parsed: TrainingBenchResult = parse_fields(
        {**document, "rows": rows}, TrainingBenchResult, where
    )
    return parsed
