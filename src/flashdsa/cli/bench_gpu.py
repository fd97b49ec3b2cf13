"""`flashdsa bench indexer --backend sm90`: run, files, tables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashdsa.cli.console import new_console, new_table, print_table, progress_bar

if TYPE_CHECKING:
    from rich.table import Table

    from flashdsa.bench.gpu.result import GpuBenchResult, GpuRow

TARGET = "indexer"
REPEATS = 30


def bench_gpu(quick: bool, repeats: int | None, out: Path | None, as_json: bool) -> None:
    """Measure on this machine's GPU and report."""
    from flashdsa.bench.gpu.cases import indexer_cases
    from flashdsa.bench.gpu.chart import draw_gpu_chart
    from flashdsa.bench.gpu.indexer import GpuBenchOptions, run_indexer_bench
    from flashdsa.bench.gpu.peers import load_peers
    from flashdsa.bench.gpu.protocol import CudaTimer
    from flashdsa.bench.gpu.result import write_gpu_result
    from flashdsa.bench.runner import result_path

    options = GpuBenchOptions(indexer_cases(quick), repeats or REPEATS)
    with progress_bar() as on_progress:
        result = run_indexer_bench(options, CudaTimer(), load_peers(), on_progress)
    path = result_path(result, TARGET, out)
    write_gpu_result(result, path)
    chart = path.with_suffix(".png")
    if result.rows:
        draw_gpu_chart(result, chart)
    if as_json:
        click.echo(result.to_json(), nl=False)
    else:
        print_gpu_result(result)
        click.echo(f"result: {path}" + (f"\nchart:  {chart}" if result.rows else ""))
    if result.stopped:
        sys.stdout.flush()
        os._exit(1)  # an ordinary end would wait for the kernel that does not end
    if any(row.findings for row in result.rows):
        raise click.exceptions.Exit(1)


def print_gpu_result(result: GpuBenchResult) -> None:
    """The tables of a result: batches, adversarial scores, what is missing or wrong, the lines."""
    console = new_console()
    best = max(result.read_gbps, key=lambda name: result.read_gbps[name])
    console.print(
        f"{result.gpu['name']}; reads at {result.read_gbps[best]:.0f} GB/s ({best}); the smallest "
        f"launch measures {result.smallest_call_us:.1f} us\n"
        f"host: {_listed(result.host_us)}; for comparison: {_listed(result.host_floor_us)}\n",
        markup=False,
    )
    batches = [row for row in result.rows if row.kind != "distribution"]
    adversarial = [row for row in result.rows if row.kind == "distribution"]
    if batches:
        print_table(console, "Speed, microseconds", _batch_table(batches))
    if adversarial:
        print_table(console, "Adversarial scores, microseconds", _data_table(adversarial))
    if result.stopped:
        console.print(f"STOPPED at {result.stopped}", style="bold red", markup=False)
    for line in remarks(result.rows):
        console.print(line, markup=False)
    table = new_table([("line", "wrap"), ("wanted", "right"), ("found", "right"), ("", "left")])
    for line_ in result.thresholds:
        found = "-" if line_.found is None else f"{line_.found:.3g}"
        met = {None: "not measured", True: "met", False: "NOT MET"}[line_.met]
        table.add_row(line_.name, line_.wanted, found, met)
    print_table(console, "Lines to hold", table)


def _listed(us: dict[str, float]) -> str:
    return ", ".join(f"{name} {taken:.1f} us" for name, taken in us.items()) or "not measured"


def _batch_table(rows: list[GpuRow]) -> Table:
    from flashdsa.bench.gpu.peers import LOGITS

    headings = (
        "ours",
        "logits",
        "+ cuDNN",
        "+ FlashInfer",
        "+ torch",
        "ratio",
        "apart",
        "ratio",
        "floor",
        "over it",
    )
    table = new_table([("batch", "wrap")] + [(heading, "right") for heading in headings])
    for row in rows:
        peers = [_peer_us(row, LOGITS), *_pairs_us(row)]
        ratios = [_times(row.ratio), _number(row.apart_us), _times(row.apart_ratio)]
        floor = (f"{row.floor_us:.2f}", _times(row.over_floor))
        table.add_row(row.name, f"{row.us_median:.1f}", *peers, *ratios, *floor)
    return table


def _number(us: float | None) -> str:
    return "-" if us is None else f"{us:.1f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _data_table(rows: list[GpuRow]) -> Table:
    headings = ("ours", "over random", "+ cuDNN", "+ FlashInfer", "+ torch", "ratio")
    table = new_table([("scores", "wrap")] + [(heading, "right") for heading in headings])
    for row in rows:
        peers = _pairs_us(row)
        over = _times(row.over_random)
        table.add_row(row.name, f"{row.us_median:.1f}", over, *peers, _times(row.ratio))
    return table


def _pairs_us(row: GpuRow) -> list[str]:
    """With cuDNN Frontend's top-k, the fastest of FlashInfer's and torch's."""
    from flashdsa.bench.gpu.peers import CUDNN_PAIR, FLASHINFER_PAIRS, TORCH_PAIR

    def slowness(name: str) -> tuple[bool, float]:
        peer = row.peers.get(name)
        us = peer.us_median if peer else None
        return peer is None or us is None or bool(peer.findings), us or 0.0

    fastest = min(FLASHINFER_PAIRS, key=slowness)
    return [_peer_us(row, name) for name in (CUDNN_PAIR, fastest, TORCH_PAIR)]


def _peer_us(row: GpuRow, name: str) -> str:
    peer = row.peers.get(name)
    if peer is None or peer.us_median is None:
        return "-"
    return f"{peer.us_median:.1f}" + ("!" if peer.findings else "")


def remarks(rows: list[GpuRow]) -> list[str]:
    """A line for everything that is missing or wrong, each said once."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        for finding in row.findings[:1]:
            lines.setdefault(f"WRONG IDS: {finding}", []).append(row.name)
        for name, peer in row.peers.items():
            if peer.missing:
                lines.setdefault(f"{name} was not measured: {peer.missing}", []).append(row.name)
            for finding in peer.findings[:1]:
                lines.setdefault(f"{name} selects wrongly (!): {finding}", []).append(row.name)
    every = len(rows)
    return [
        f"{text} [{'every case' if len(names) == every else ', '.join(names)}]"
        for text, names in lines.items()
    ]
