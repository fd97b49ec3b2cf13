"""`python -m workbench draws`: shapes of a distribution, timed beside every peer; the report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table
from flashdsa.cli.main import FlashDsaGroup
from flashdsa.cli.output_options import PICTURES, OutputFile, backend_option
from flashdsa.output_paths import written

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from flashdsa.bench.result import Row
    from workbench.draws.distribution import Draw
    from workbench.draws.report import Change, Figures, Report

OPERATIONS = (
    "forward", "prompts", "decode", "chats", "backward", "indexer", "prefill", "two-levels",
    "two-levels-prefill", "forward-512", "backward-512", "decode-512", "training",
)  # fmt: skip


class _RunByDefault(FlashDsaGroup):
    """`draws forward` is `draws run forward`."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] in OPERATIONS:
            args = ["run", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_RunByDefault)
def draws() -> None:
    """Time shapes that are drawn from a written distribution, beside every peer.

    \b
      run      draw, judge, time: `draws forward` is `draws run forward`
      report   lowest, 5th percentile, median, geometric mean; another run beside

    workbench/DRAWS.md says how; python -m workbench.draws.distribution prints the distribution.
    --seed is free.
    """


@draws.command()
@click.argument(
    "operations", metavar="OPERATION...", nargs=-1, required=True, type=click.Choice(OPERATIONS)
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of draws.")
@click.option(
    "--count", type=click.IntRange(min=1), default=200, show_default=True, help="An operation."
)
@click.option(
    "--only", "numbers", type=click.IntRange(min=0), multiple=True, help="This draw; repeatable."
)
@click.option(
    "--fix", "fixed", multiple=True, metavar="NAME=VALUE",
    help="This value in place of the drawn one, as a draw's line has it; repeatable.",
)  # fmt: skip
@click.option(
    "--peers", default="all", show_default=True,
    help="all, none, or parts of names, by commas; triton and torch are ours by these backends.",
)  # fmt: skip
@click.option(
    "--budget", type=click.FloatRange(min=0), metavar="SECONDS",
    help="No draw begins that would not end within it; below 4 s a draw, samples are shorter.",
)  # fmt: skip
@click.option("--list", "listed", is_flag=True, help="Print the draws; no GPU is needed.")
@backend_option("sm90", "Of ours; a CPU times tiny forms of the draws.")
@click.option("--out", type=OutputFile(".json"), help="The JSON document that `report` reads.")
@json_option
def run(
    peers: str,
    budget: float | None,
    listed: bool,
    backend: str,
    out: Path | None,
    as_json: bool,
    **which: Any,
) -> None:
    """Draw shapes of operations, judge ours against float64, time it by turns with every peer.

    A draw is a function of operation, seed and number. Four rows of each result are judged before
    it is timed; outputs are poisoned. A wrong result is shown and is exit code 1. Operations take
    turns, so that a budget gives each as many draws.

    \b
    Examples
      python -m workbench draws run forward --list --count 5
      python -m workbench draws run decode --seed 7 --only 12 --peers none
      python -m workbench draws run forward backward --budget 300 --out x.json
      python -m workbench draws run decode --count 1 --fix b=64 --fix heads=128
    """
    wanted = _drawn(**which)
    if not backend.startswith("sm") and not listed:
        wanted = [one.small() for one in wanted]
    if listed:
        lines = [one.line for one in wanted]
        if as_json:
            print_json(lines)
        else:
            click.echo("\n".join(lines))
        return
    _measure(wanted, peers, budget, backend, out, as_json)


def _drawn(
    operations: tuple[str, ...],
    seed: int,
    count: int,
    numbers: tuple[int, ...],
    fixed: tuple[str, ...],
) -> list[Draw]:
    from workbench.draws.distribution import draw
    from workbench.draws.fixed import fixed_value

    values = {one: dict(fixed_value(one, words) for words in fixed) for one in operations}
    return [draw(one, seed, i, values[one]) for i in numbers or range(count) for one in operations]


def _measure(
    wanted: list[Draw],
    peers: str,
    budget: float | None,
    backend: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run draws; write, show, and end with the exit code."""
    import json
    import os
    import sys

    from flashdsa.bench.result import OURS
    from flashdsa.cli.availability import require_runnable
    from flashdsa.cli.console import progress_bar
    from workbench.draws.peers import OTHERS
    from workbench.draws.run import DrawOptions, rows_of, run_draws

    require_runnable(backend)
    parts = [part.strip().lower() for part in peers.split(",")]

    def is_wanted(name: str) -> bool:
        named = any(part in name.lower() for part in parts)
        if name in OTHERS.values():
            return named
        return peers == "all" or name.startswith(OURS) or (peers != "none" and named)

    def keep(document: dict[str, Any]) -> None:
        if out is not None:
            with written(out) as draft:
                draft.write_text(json.dumps(document) + "\n", encoding="utf-8")

    with progress_bar() as on_progress:
        document = run_draws(DrawOptions(wanted, backend, budget, is_wanted), on_progress, keep)
    rows = rows_of(document)
    if as_json:
        print_json(document)
    else:
        _show(rows, lines=len(rows) <= 10)
        end = f"{document['done']} of {document['asked']} draws in {document['wall_s']} s"
        click.echo(end + (f"; result: {out}" if out else ""))
        if document["stopped"]:
            click.echo(f"STOPPED at {document['stopped']}")
    if document["stopped"]:
        sys.stdout.flush()
        os._exit(1)  # an ordinary end would wait for the kernel that does not end
    if any(name.startswith(OURS) for row in rows for name in row.findings):
        raise click.exceptions.Exit(1)


@draws.command()
@click.argument(
    "results", metavar="FILE...", nargs=-1, required=True,
    type=click.Path(path_type=Path, dir_okay=False),
)  # fmt: skip
@click.option(
    "--baseline",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A run of the same draws: its times of ours over these.",
)
@click.option("--all", "lines", is_flag=True, help="A line for every draw.")
@click.option("--chart", type=OutputFile(*PICTURES), help="Ratios as strips of dots.")
@json_option
def report(
    results: tuple[Path, ...], baseline: Path | None, lines: bool, chart: Path | None, as_json: bool
) -> None:
    """Show the distribution of the fastest peer's time over ours: above 1, ours is faster.

    Several runs are taken together. A draw that no peer serves has a time and no ratio.

    \b
    Examples
      python -m workbench draws report x.json --all
      python -m workbench draws report new.json --baseline old.json
      python -m workbench draws report x.json y.json --json
    """
    from workbench.draws.report import changes, reports
    from workbench.draws.run import read_document, read_draws

    rows = [row for path in results for row in read_draws(path)]
    compared = list(changes(read_draws(baseline), rows)) if baseline else []
    if chart is not None:
        from workbench.draws.chart import draw_draws

        draw_draws([read_document(path) for path in results], chart)
    if as_json:
        from dataclasses import asdict

        print_json({
            "reports": [one.as_dict() for one in reports(rows)],
            "changes": [asdict(one) for one in compared],
        })  # fmt: skip
        return
    _show(rows, lines=lines)
    if compared:
        _show_changes(new_console(), compared)


_FIGURES = ("lowest", "5 %", "median", "mean")


def _cells(figures: Figures | None) -> list[str]:
    if figures is None:
        return ["-"] * len(_FIGURES)
    numbers = (figures.lowest, figures.p5, figures.median, figures.geometric_mean)
    return [f"{number:.2f}" for number in numbers]


def _show(rows: list[Row], *, lines: bool) -> None:
    """Figures, the lowest draws, what no peer serves, what is wrong."""
    from workbench.draws.report import CONDITIONS, reports

    console, found = new_console(), list(reports(rows))
    headings = [(name, "right") for name in ("draws", *_FIGURES, "ceiling")]
    table = new_table([("operation", "left"), ("", "left"), *headings])
    for one in found:
        largest = "-" if one.at_ceiling is None else f"{one.at_ceiling:.2f}"
        for condition in [c for c in CONDITIONS if c in one.figures] or CONDITIONS[:1]:
            cells = _cells(one.figures.get(condition))
            table.add_row(one.operation, condition, str(one.draws), *cells, largest)
            largest = ""
    print_table(console, "fastest peer's time over ours", table)
    console.print("ceiling: the mean that ours would have at the chip's own rates, which bind all")
    for one in found:
        _show_details(console, one)
    if lines:
        _show_lines(console, rows)


def _show_details(console: Console, one: Report) -> None:
    table = new_table([("ratio", "right"), ("", "left"), ("peer", "left"), ("draw", "wrap")])
    for ratio, condition, peer, line in one.lowest:
        table.add_row(f"{ratio:.2f}", condition, peer, line)
    if one.lowest:
        print_table(console, f"{one.operation}: the lowest", table)
    for cost in one.cost:
        console.print(
            f"{one.operation}, {cost.condition}: {cost.option} costs {cost.mean:.2f} of the "
            f"default in the mean, 95 % at most {cost.p95:.2f}, all {cost.largest:.2f}"
        )
    if one.unserved:
        times = f"{min(one.unserved)[0]:.4g} to {max(one.unserved)[0]:.4g} us"
        console.print(f"{one.operation}: {len(one.unserved)} draws that no peer serves: {times}")
    for reason, count in sorted(one.missing.items(), key=lambda item: -item[1]):
        console.print(f"  {count} draws without {reason}", markup=False)
    for line in one.wrong:
        console.print(f"WRONG {line}", style="bold red", markup=False)


def _show_lines(console: Console, rows: Iterable[Row]) -> None:
    from flashdsa.bench.result import OURS

    for row in rows:
        words = []
        for condition, times in row.times.items():
            peer = row.fastest_peer(condition)
            beside = (
                f", {peer} {times[peer].median:.4g} = {row.ratio(condition):.2f}" if peer else ""
            )
            words.append(f"{condition} {times[OURS].median:.4g} us{beside}")
        click.echo(f"{row.operation} | {'; '.join(words)} | {row.case}")


def _show_changes(console: Console, compared: list[Change]) -> None:
    headings = [(name, "right") for name in ("draws", *_FIGURES, "peers' mean")]
    table = new_table([("operation", "left"), ("", "left"), *headings])
    lowest = new_table([("ratio", "right"), ("", "left"), ("draw", "wrap")])
    for one in compared:
        for condition, figures in one.figures.items():
            machine = one.machine.get(condition)
            beside = "-" if machine is None else f"{machine:.2f}"
            cells = [str(figures.count), *_cells(figures), beside]
            table.add_row(one.operation, condition, *cells)
        for ratio, condition, line in one.lowest:
            lowest.add_row(f"{ratio:.2f}", condition, line)
    print_table(console, "the baseline's time over the new one's, of ours", table)
    print_table(console, "the lowest", lowest)
