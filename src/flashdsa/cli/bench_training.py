"""`flashdsa bench indexer_training --backend sm90`: run, file, table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashdsa.cli.bench_beside_flash_mla import print_findings, report
from flashdsa.cli.console import new_console, new_table, print_table, progress_bar

if TYPE_CHECKING:
    from flashdsa.bench.gpu.training import TrainingBenchResult

TARGET = "indexer_training"


def bench_training(quick: bool, out: Path | None, as_json: bool) -> None:
    """Measure on this machine's GPU and report."""
    from flashdsa.bench.gpu.bursts import CudaBurstTimer
    from flashdsa.bench.gpu.training import run_training_bench
    from flashdsa.bench.gpu.training_cases import TRAINING_CASES

    cases = [case.quick() for case in TRAINING_CASES] if quick else list(TRAINING_CASES)
    with progress_bar() as on_progress:
        result = run_training_bench(cases, CudaBurstTimer(with_host=True), on_progress)
    report(result, TARGET, out, as_json, print_training_result)


def print_training_result(result: TrainingBenchResult) -> None:
    """The table of a result, and what is wrong."""
    console = new_console()
    columns = ("burst ms", "hot ms", "TFLOPS", "worst error")
    table = new_table([("case", "wrap"), *((name, "right") for name in columns)])
    for row in result.rows:
        rate = f"{row.hot_tflops:.0f}" if row.hot_tflops else "-"
        worst = f"{max(row.errors.values()):.0e}" if row.errors else "-"
        table.add_row(row.name, f"{row.burst_ms:.3f}", f"{row.hot_ms:.3f}", rate, worst)
    print_table(console, f"Training the indexer on {result.gpu['name']}", table)
    console.print(
        "burst: a call behind a pause, host time included. TFLOPS: hot. worst error: of a "
        "result's norm, against float64.",
        markup=False,
    )
    print_findings(console, result.rows)
