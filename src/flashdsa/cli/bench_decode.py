"""`flashdsa bench sparse_mla_decode --backend sm90`: run, file, table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashdsa.cli.bench_beside_flash_mla import print_notes, report
from flashdsa.cli.console import new_console, new_table, print_table, progress_bar

if TYPE_CHECKING:
    from flashdsa.bench.gpu.decode import DecodeBenchResult, DecodeRow

TARGET = "sparse_mla_decode"
QUICK_ROWS = {True: 2**14, False: 2**14}


def bench_decode(quick: bool, out: Path | None, as_json: bool) -> None:
    """Measure on this machine's GPU and report."""
    from flashdsa.bench.gpu.decode import CudaDecodeTimer, flash_mla_decode, run_decode_bench
    from flashdsa.bench.gpu.decode_cases import decode_cases

    with progress_bar() as on_progress:
        result = run_decode_bench(
            decode_cases(quick),
            CudaDecodeTimer(),
            flash_mla_decode(),
            on_progress,
            num_rows=QUICK_ROWS if quick else None,
        )
    report(result, TARGET, out, as_json, print_decode_result)


def print_decode_result(result: DecodeBenchResult) -> None:
    """The table of a result, why FlashMLA is missing, and what is wrong."""
    console = new_console()
    table = new_table(
        [("case", "wrap")]
        + [(h, "right") for h in ("hot us", "cold us", "TFLOPS", "GB/s", "FlashMLA", "hot", "cold")]
    )
    for row in result.rows:
        table.add_row(*_cells(row))
    print_table(console, f"Decode of sparse MLA on {result.gpu['name']}", table)
    console.print(
        "TFLOPS, GB/s: hot, of valid slots. FlashMLA: its hot us; hot, cold: its time over ours.",
        markup=False,
    )
    print_notes(console, result.rows)


def _cells(row: DecodeRow) -> list[str]:
    cells = [row.name, f"{row.hot_us:.1f}", f"{row.cold_us:.1f}"]
    cells += [f"{row.hot_tflops:.0f}", f"{row.hot_gbps:.0f}"]
    if row.peer is None or row.hot_ratio is None or row.cold_ratio is None:
        return [*cells, "-", "-", "-"]
    return [*cells, f"{row.peer.hot_us:.1f}", f"{row.hot_ratio:.2f}x", f"{row.cold_ratio:.2f}x"]
