"""`python -m workbench lab hazards`: pairs of MMAs that nothing orders, or that the ISA orders."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from flashdsa.cli.console import (
    json_option,
    new_console,
    new_table,
    print_json,
    print_table,
    progress_bar,
)

if TYPE_CHECKING:
    from workbench.lab.hazards import HazardRow

NAMES = (
    *("pair", "pair-ws", "threads", "shapes", "early-read", "overwrite", "late-operand"),
    *("fence-only", "wgmma-pair", "wgmma-early-read", "wgmma-overwrite", "wgmma-no-fence"),
)
"""Those of workbench.lab.hazards, kept here so that --help is quick."""
SHOWN_COLUMNS = 3
"""Ranges of wrong columns in the table; --json has all."""


@click.command()
@click.option(
    "--only",
    "names",
    multiple=True,
    type=click.Choice(NAMES),
    metavar="NAME",
    help="Run only this one; may be repeated.  [default: all]",
)
@click.option(
    "--b-major", type=click.Choice(["k", "mn"]), default="mn", show_default=True, help="Of dO^T."
)
@click.option(
    "--schedule",
    type=click.Choice(["late", "eager", "random"]),
    help="Only this schedule, with --schedule-seed.  [default: all three, several seeds]",
)
@click.option("--schedule-seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--seeds", type=click.IntRange(min=1), default=4, show_default=True, help="Seeds to try."
)
@json_option
def hazards(
    names: tuple[str, ...],
    b_major: str,
    schedule: str | None,
    schedule_seed: int,
    seeds: int,
    as_json: bool,
) -> None:
    """Run pairs of MMAs on one accumulator in which something is, or is not, unordered.

    Each kernel computes dV = S^T dO on integers, part 0 clearing, part 1 accumulating, on ptxemu
    under several schedules. Where the ISA leaves something unordered, ptxemu must say so in one
    line that names both instructions, and some schedule must give wrong numbers; where the ISA
    orders, ptxemu must be silent and the numbers right under every schedule.

    \b
    Names
      pair          one thread, same shape, back to back (as in the kernel)
      pair-ws       the same as tcgen05.mma.ws, M = 32 and 64, N = 64 to 256
      threads       the parts issued by threads of two warps
      shapes        part 1 in two halves of N
      early-read    D read before commit and wait
      overwrite     B overwritten before commit and wait
      late-operand  part 1 of B written too late
      fence-only    a fence and a barrier between the parts, no commit: the
                    readback races
      wgmma-...     pair, early-read, overwrite, and no-fence: no wgmma.fence
                    before the first

    \b
    Columns
      wrong in  how many schedules gave wrong numbers, of those tried
      columns   of D that were wrong: all, or from first to last; for fence-only
                of D as read back
      first     schedule and seed of the first wrong result: --schedule and
                --schedule-seed

    \b
    Examples
      python -m workbench lab hazards
      python -m workbench lab hazards --only threads --only pair
      python -m workbench lab hazards --only threads --schedule late
    """
    from ptxemu import Policy
    from workbench.lab.hazards import run_hazards, schedules_of

    policies = schedules_of(range(seeds))
    if schedule is not None:
        policies = [Policy(asynchronous=schedule, seed=schedule_seed)]
    with progress_bar() as on_progress:
        rows = run_hazards(
            names or NAMES, b_major=b_major, policies=policies, on_progress=on_progress
        )
    failed = sum(not row.passed for row in rows)
    if as_json:
        print_json({"b_major": b_major, "failed": failed, "rows": [asdict(row) for row in rows]})
    else:
        _print_rows(rows)
    # NOTE: one schedule need not be the one that gives wrong numbers, so it proves no failure.
    if failed and schedule is None:
        raise SystemExit(1)


def _print_rows(rows: list[HazardRow]) -> None:
    console = new_console()
    headings = [("hazard", "left"), ("M x N", "right"), ("ptxemu", "left")]
    headings += [("wrong in", "right"), ("columns", "wrap"), ("first", "left"), ("", "right")]
    table = new_table(headings)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.m}x{row.n}",
            row.findings[0].split(": ")[1] if row.findings else "silent",
            f"{row.wrong_schedules} of {row.schedules}",
            ", ".join(row.wrong_columns[:SHOWN_COLUMNS]),
            row.wrong_schedule or "",
            "[green]ok[/]" if row.passed else "[bold red]FAILED[/]",
        )
    print_table(console, "Two MMAs on one accumulator, on ptxemu (sm_100a; wgmma: sm_90a)", table)
    for row in reversed({row.name: row for row in reversed(rows)}.values()):
        click.echo(f"{row.name}: {row.what}")
        click.echo(f"  ISA: {row.isa}")
        for finding in row.findings[:1]:
            click.echo(f"  ptxemu: {finding}")
        click.echo()
