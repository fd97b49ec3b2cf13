"""`flashdsa bench sparse_mla_fwd --backend sm90`: run, file, table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashdsa.cli.bench_beside_flash_mla import print_notes, report
from flashdsa.cli.console import new_console, new_table, print_table, progress_bar

if TYPE_CHECKING:
    from flashdsa.bench.gpu.forward import ForwardBenchResult, ForwardRow

TARGET = "sparse_mla_fwd"


def bench_forward(quick: bool, out: Path | None, as_json: bool) -> None:
    """Measure on this machine's GPU and report."""
    from flashdsa.bench.gpu.bursts import CudaBurstTimer
    from flashdsa.bench.gpu.forward import flash_mla_call, run_forward_bench
    from flashdsa.bench.gpu.forward_cases import FORWARD_CASES

    cases = [case.quick() for case in FORWARD_CASES] if quick else list(FORWARD_CASES)
    with progress_bar() as on_progress:
        result = run_forward_bench(cases, CudaBurstTimer(), flash_mla_call(), on_progress)
    report(result, TARGET, out, as_json, print_forward_result)


def print_forward_result(result: ForwardBenchResult) -> None:
    """The table of a result, why FlashMLA is missing, and what is wrong."""
    console = new_console()
    table = new_table(
        [("case", "wrap")]
        + [(h, "right") for h in ("burst ms", "hot ms", "TFLOPS", "FlashMLA", "burst", "hot")]
    )
    for row in result.rows:
        table.add_row(*_cells(row))
    title = f"Forward of sparse MLA on {result.gpu['name']}"
    print_table(console, title, table)
    console.print(
        "TFLOPS: hot, of valid slots. FlashMLA: its hot ms; burst, hot: its time over ours.",
        markup=False,
    )
    print_notes(console, result.rows)


def _cells(row: ForwardRow) -> list[str]:
    cells = [row.name, f"{row.burst_ms:.3f}", f"{row.hot_ms:.3f}", f"{row.hot_tflops:.0f}"]
    if row.peer is None or row.burst_ratio is None or row.hot_ratio is None:
        return [*cells, "-", "-", "-"]
    return [*cells, f"{row.peer.hot_ms:.3f}", f"{row.burst_ratio:.2f}x", f"{row.hot_ratio:.2f}x"]
