"""`flashdsa bench`: speed and memory of the operations, as JSON, a table and a chart."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_table, progress_bar
from flashdsa.cli.output_options import JsonOrFolder, backend_option

if TYPE_CHECKING:
    from rich.console import Console

    from flashdsa.bench.result import BenchResult, Row
    from flashdsa.bench.runner import BenchOptions

TARGETS = (
    "sparse_mla_fwd", "sparse_mla_decode", "mla_bwd", "indexer", "indexer_training", "topk",
    "entries", "memory", "all",
)  # fmt: skip
ON_CPU = ("sparse_mla_fwd", "mla_bwd", "indexer", "topk")
"""Targets that "all" measures on a CPU."""
DTYPES = ("float32", "bfloat16", "float64")
_SIZE = click.IntRange(min=1)
_MIB = 1 << 20


@click.command()
@click.argument("target", metavar="[TARGET]", type=click.Choice(TARGETS), default="all")
@click.option("--s", "s", type=_SIZE, help="Queries (batch rows).")
@click.option("--s-kv", "s_kv", type=_SIZE, help="Keys.")
@click.option("--h", "h", type=_SIZE, help="Heads.")
@click.option("--topk", type=_SIZE, help="Keys a query selects.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of q and kv.")
@click.option("--repeats", type=_SIZE, help="Samples of each time.  [default: 7; on a GPU 15]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of inputs.")
@backend_option("cpu", "Which implementation to time.")
@click.option("--quick", is_flag=True, help="Two small cases each, 3 repeats: does it work?")
@click.option(
    "--out",
    type=JsonOrFolder(),
    help="A .json file or a folder.  [default: workbench/results/<machine>/ in a checkout, "
    "./out/ elsewhere]",
)
@json_option
def bench(
    target: str,
    repeats: int | None,
    seed: int,
    backend: str,
    quick: bool,
    out: Path | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Measure speed and memory; write JSON and a chart (PNG) beside it.

    TARGET is sparse_mla_fwd, sparse_mla_decode, mla_bwd, indexer, indexer_training, topk,
    entries, memory (on a CPU) or all (the default). Sizes replace the default cases by one case of
    these sizes.
    Every result is judged against float64: exit code 1 if one is wrong.

    Each operation is timed by turns with a ceiling: what the same machine reaches in the same run
    on the plainest code of its kind, torch.matmul or one reading of a large buffer.

    \b
    Columns
      hot           median time of a call back to back with others
      cold          the same with nothing in the GPU's L2
      rate          useful work over the median of the first of these
      of ceiling    rate / the ceiling's rate
      host          time that a call keeps the host busy (on a GPU)
      error         largest error of a result's norm, against float64
      extra         peak resident memory beyond inputs and outputs, each call
                    in a new process

    \b
    Examples
      flashdsa bench --quick
      flashdsa bench sparse_mla_fwd --s 16 --s-kv 8192 --h 128 --topk 2048
      flashdsa bench memory              does the peak stay flat when S grows?
      flashdsa bench all --out out/mine.json
      flashdsa bench mla_bwd --backend sm90        on an H100 or H200, a minute
      flashdsa bench --backend triton --quick      on an NVIDIA GPU since A100
    """
    import flashdsa.bench.chart  # noqa: F401  # what it needs is missing before the run, not after
    from flashdsa.bench.runner import default_folder, run_bench
    from flashdsa.bench.timer import new_timer
    from flashdsa.cli.availability import require_runnable
    from flashdsa.output_paths import require_creatable_folder

    require_runnable(backend)
    if out is None:
        require_creatable_folder("--out", default_folder())
    given = {name: value for name, value in sizes.items() if value is not None}
    options = _options(target, backend, quick, given)
    options = replace(options, seed=seed, repeats=repeats or (3 if quick else None))
    with progress_bar() as on_progress:
        result = run_bench(options, new_timer(options.device, seed), on_progress)
    report(result, target, out, as_json)


def _options(target: str, backend: str, quick: bool, given: dict[str, Any]) -> BenchOptions:
    from flashdsa.bench.cases import Case
    from flashdsa.bench.memory import QUERIES
    from flashdsa.bench.runner import OPERATIONS, BenchOptions, memory_plan

    options = BenchOptions((), backend)
    on_gpu = options.device == "cuda"
    if target == "memory" and on_gpu:
        raise click.UsageError("memory: resident memory is measured on a CPU; use --backend cpu")
    names = tuple(OPERATIONS) if on_gpu else ON_CPU
    if target != "all":
        names = () if target == "memory" else (target,)
    plan = []
    for name in names:
        cases = OPERATIONS[name].cases[options.device]
        if given:
            cases = [replace(cases[0], name="", **given)]
        if quick:
            cases = [case.quick() for case in cases[:2]]
        plan.append((OPERATIONS[name], cases))
    memory: list[tuple[str, Case]] = []
    if target in ("all", "memory") and not on_gpu:
        case = replace(Case(), **given)
        memory = memory_plan(case.quick() if quick else case, (1, 4) if quick else QUERIES)
    return replace(options, plan=plan, memory=memory)


def report(result: BenchResult, target: str, out: Path | None, as_json: bool) -> None:
    """Write a run's files, show it, and end with exit code 1 where a result is wrong.

    Raises:
        UnsupportedError: the backend serves none of the cases.
    """
    from flashdsa.bench.chart import draw_chart
    from flashdsa.bench.result import OURS
    from flashdsa.bench.runner import result_path
    from flashdsa.errors import UnsupportedError

    timed = [row for row in result.rows if row.times]
    if result.rows and not timed:
        raise UnsupportedError(result.rows[0].missing[OURS])
    path = result_path(result, target, out)
    result.write(path)
    chart = path.with_suffix(".png")
    if timed:
        draw_chart(result, chart)
    if as_json:
        click.echo(result.to_json(), nl=False)
    else:
        print_result(result)
        click.echo(f"result: {path}" + (f"\nchart:  {chart}" if timed else ""))
    if result.stopped:
        sys.stdout.flush()
        os._exit(1)  # an ordinary end would wait for the kernel that does not end
    if result.wrong:
        raise click.exceptions.Exit(1)


def print_result(result: BenchResult) -> None:
    """A table for each operation, memory, and what is missing or wrong."""
    console = new_console()
    for operation in dict.fromkeys(row.operation for row in result.rows):
        _print_operation(console, [row for row in result.rows if row.operation == operation])
    if result.memory:
        headings = [(name, "right") for name in ("inputs", "outputs", "extra")]
        table = new_table([("operation", "left"), ("problem", "wrap"), *headings])
        for used in result.memory:
            counts = (used.input_bytes, used.output_bytes, used.extra_peak_bytes)
            sizes = " ".join(f"{name}={value}" for name, value in used.problem.items())
            table.add_row(used.operation, sizes, *(f"{count / _MIB:.1f}" for count in counts))
        print_table(console, "Peak memory in MiB", table)
    if result.host_floor_us is not None:
        console.print(f"host: x.add_(1) takes {result.host_floor_us:.1f} us", markup=False)
    if result.stopped:
        console.print(f"STOPPED at {result.stopped}", style="bold red", markup=False)
    for line, wrong in remarks(result.rows):
        console.print(line, style="bold red" if wrong else None, markup=False)


def _print_operation(console: Console, rows: list[Row]) -> None:
    from flashdsa.bench.result import OURS

    conditions = list(dict.fromkeys(name for row in rows for name in row.times))
    headings = [*conditions, "rate", "of ceiling", "host", "error"]
    table = new_table([("case", "wrap"), *((name, "right") for name in headings)])
    for row in rows:
        if not any(OURS in times for times in row.times.values()):
            continue
        first = next(name for name, times in row.times.items() if OURS in times)
        ours = [row.times.get(name, {}).get(OURS) for name in conditions]
        cells = ["-" if one is None else duration(one.median) for one in ours]
        share = row.rate(first) / row.ceiling_rate(first)
        cells += [_rate(row.rate(first), row.unit), f"{share:.2f}"]
        cells.append(duration(row.host_us[OURS]) if OURS in row.host_us else "-")
        worst = f"{max(row.errors.values()):.0e}" if row.errors else "none"
        cells.append("WRONG" if row.findings.get(OURS) else worst)
        table.add_row(row.case, *cells)
    timed = [row for row in rows if row.times]
    against = f", ceiling: {timed[0].ceiling}" if timed else ""
    print_table(console, f"{rows[0].operation}, {rows[0].backend}{against}", table)


def duration(us: float) -> str:
    """Return the time with a unit: 66 ms, 11.7 us."""
    if us >= 1e6:
        return f"{us / 1e6:.3g} s"
    return f"{us / 1e3:.4g} ms" if us >= 1e3 else f"{us:.3g} us"


def _rate(giga: float, unit: str) -> str:
    name = "FLOPS" if unit == "FLOP" else "B/s"
    return f"{giga / 1e3:.3g} T{name}" if giga >= 1e3 else f"{giga:.3g} G{name}"


def remarks(rows: list[Row]) -> list[tuple[str, bool]]:
    """A line for everything that is missing or wrong, each said once; True: a result is wrong."""
    lines: dict[tuple[str, bool], list[str]] = {}
    for row in rows:
        for name, reason in row.missing.items():
            lines.setdefault((f"{name} was not timed: {reason}", False), []).append(row.case)
        for name, findings in row.findings.items():
            text = f"{name} is WRONG: {findings[0]}"
            lines.setdefault((text, True), []).append(row.case)
    return [
        (f"{text} [{'every case' if len(at) == len(rows) else ', '.join(at)}]", wrong)
        for (text, wrong), at in lines.items()
    ]
