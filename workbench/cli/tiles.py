"""`python -m workbench tiles`: which tiles of Triton's kernels are fastest on this GPU."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table
from flashdsa.cli.output_options import OutputFile
from flashdsa.errors import ArgumentValueError
from flashdsa.output_paths import written


@click.command()
@click.argument("kernels", metavar="[KERNEL]...", nargs=-1)
@click.option(
    "--budget", type=click.FloatRange(min=1), default=150.0, show_default=True, metavar="SECONDS",
    help="Of the trials four fifths: what is not reached is said.",
)  # fmt: skip
@click.option(
    "--processes", type=click.IntRange(min=1), help="That try.  [default: the CPU's cores]"
)
@click.option("--emulated", is_flag=True, help="Small calls and two candidates, without a GPU.")
@click.option("--out", type=OutputFile(".json"), help="The document.")
@json_option
def tiles(
    kernels: tuple[str, ...], budget: float, processes: int | None, emulated: bool,
    out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Time tiles of Triton's kernels on this GPU; write what is fastest.

    KERNEL is a row of backends/triton/launch.py, or its beginning; without one
    all are meant. Many processes compile candidates, hold each against what
    today's tile gives, and time it; the best of each size are timed again.

    \b
    Columns
      tile     heads x keys, warps, stages, parts of V's columns; * today's
      mean     of the times over the fastest of each size; 1 is the best
      others   microseconds of each size

    Exit code 1: a result is wrong.

    \b
    Examples
      python -m workbench tiles --out tiles.json
      python -m workbench tiles forward packed --budget 60
      python -m workbench tiles scores --emulated --json
    """
    import torch

    from workbench.tiles import CANDIDATES, Device, Pool, measure

    chosen = [name for name in CANDIDATES if not kernels or any(map(name.startswith, kernels))]
    if not chosen:
        raise ArgumentValueError(f"KERNEL: expected the beginning of {'; '.join(CANDIDATES)}")
    if not (emulated or torch.cuda.is_available()):
        raise ArgumentValueError("tiles: needs a GPU; --emulated needs none")
    device, started = Device("cpu" if emulated else "cuda"), time.monotonic()
    count = processes or len(os.sched_getaffinity(0))
    found = Pool(device, chosen, count, started + 0.8 * budget).found
    document: dict[str, Any] = {"device": _name(device.name), "kernels": {}}
    for name in chosen:
        document["kernels"][name] = measure(name, device, found[name])
        document["seconds"] = round(time.monotonic() - started, 1)
        if out is not None:
            with written(out) as draft:
                draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if not as_json:
            _show(name, document["kernels"][name])
    if as_json:
        print_json(document)
    else:
        click.echo(f"{document['seconds']} s")
    sys.exit(any("wrong" in why for one in document["kernels"].values()
                 for why in one["failed"].values()))  # fmt: skip


def _name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "emulated"


def _show(kernel: str, found: dict[str, Any]) -> None:
    """The fastest tiles, today's, and what failed."""
    from workbench.tiles import ranked

    console, us, today = new_console(), found["us"], found["today"]
    table = new_table([("tile", "left"), ("mean", "right"), *((size, "right") for size in us)])
    for mean, name in ranked(us):
        times = (f"{us[size][name]:.1f}" for size in us)
        table.add_row(("* " if name == today else "") + name, f"{mean:.3f}", *times)
    print_table(console, f"{kernel} ({found['family']}), microseconds", table)
    for name, why in found["failed"].items():
        console.print(f"{name}: {why}", markup=False, highlight=False, soft_wrap=True)
