"""`python -m workbench mutate`: kernels with one synchronisation broken; is it noticed?"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from flashdsa.cli.console import json_option, print_json
from flashdsa.cli.output_options import OutputFolder

ROWS = Path("build/mutants")


@click.command()
@click.argument("kernels", metavar="[KERNEL]...", nargs=-1)
@click.option("--jobs", default=os.cpu_count() or 1, help="Processes.  [default: one a core]")
@click.option("--again", is_flag=True, help="Only what a whole run did not catch.")
@click.option("--limit", type=click.IntRange(1), help="At most so many; the table stays.")
@click.option("--stale", is_flag=True, help="List counts of other PTX than today's, try nothing.")
@click.option(
    "--launches", type=click.Path(path_type=Path), help="They have been saved there by `launch`."
)
@click.option(
    "--rows",
    type=OutputFolder(),
    default=ROWS,
    show_default=True,
    help="Where each mutant is written down, so that a run that was stopped goes on.",
)
@json_option
def mutate(
    kernels: tuple[str, ...], jobs: int, again: bool, limit: int | None, stale: bool,
    launches: Path | None, rows: Path, as_json: bool,
) -> None:  # fmt: skip
    """Break kernels' synchronisation, one instruction at a time: is it noticed?

    Each mutant runs on ptxemu over the kernel's small calls, under several
    schedules, until the check, a wrong result or a deadlock tells of it.
    Counts go into workbench/results/mutation/kernels.json and the table in
    its README.md. A mutant that you have understood to be harmless goes into
    equivalent/KERNEL.txt there, with the reason.

    KERNEL is a row of workbench/small_calls/table.py, a kernel's name, or a
    row of workbench/mutation/campaign.py.  [default: all of this library]

    Launches that `python -m workbench launch --save` has written need no
    CuTe DSL: take them where there are many cores.

    Exit code 1: a mutant survived, an argument is about none, or counts are
    stale.

    \b
    Examples
      python -m workbench mutate indexer_order
      python -m workbench mutate mla-fwd-sm_90a --limit 5 --json
      python -m workbench mutate indexer-sm_90a --again --jobs 16
      python -m workbench mutate --stale
    """
    from workbench.mutation.campaign import (
        Campaign,
        chosen,
        save,
        staleness,
        survivors_of,
        write_row,
    )

    good, found = True, []
    for name, row in chosen(kernels).items():
        with tempfile.TemporaryDirectory() as folder:
            saved = launches or Path(folder)
            if launches is None:
                save(name, row, saved, first=stale)
            one: dict[str, Any] = {"name": name}
            if stale:
                then, now = staleness(name, saved)
                said = "as it is" if then == now else f"stale: of {then}, and it is {now}"
                one |= {"counted": then, "ptx": now}
                good &= then == now
            else:
                campaign = Campaign(name, row, saved, rows)
                report, strangers = campaign.try_all(jobs, again, limit)
                one = {**campaign.counted(report), "strangers": strangers}
                one["left"] = list(survivors_of(report))
                said = "\n".join(report.lines())
                good &= not (report.survivors or strangers)
                if limit is None:
                    write_row(campaign.counted(report))
        found.append(one)
        if not as_json:
            click.echo(f"{name}: {said}")
    if as_json:
        print_json({"kernels": found})
    sys.exit(not good)
