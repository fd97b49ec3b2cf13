"""`python -m workbench launch`: small calls of a kernel, emulated and judged, or saved."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from flashdsa.cli.console import json_option, print_json
from flashdsa.cli.output_options import OutputFolder
from flashdsa.errors import ArgumentValueError


@click.command()
@click.argument("kernels", metavar="[KERNEL]...", nargs=-1)
@click.option("--call", "text", default="", metavar="TEXT", help="Calls with this in their name.")
@click.option(
    "--save",
    type=OutputFolder(),
    default=None,
    help="Write the kernel's launches there, for ptxemu; judge nothing.",
)
@click.option("--gpu", is_flag=True, help="On this machine's GPU: one call a process.")
@click.option("--list", "only_list", is_flag=True, help="Name the calls, run nothing.")
@json_option
def launch(
    kernels: tuple[str, ...], text: str, save: Path | None, gpu: bool, only_list: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Small calls of a kernel: emulated, checked by ptxemu and judged.

    KERNEL is a row of workbench/small_calls/table.py, or the name that
    `python -m workbench plan` has, whose rows are all meant. A call is a public operation
    on a device of few multiprocessors; its results are judged against float64.

    \b
    What ptxemu does with a saved launch needs neither CuTe DSL nor torch:
      ptxemu trace launches/mla-fwd-sm_90a.0.launch
      ptxemu mutate launches/mla-fwd-sm_90a.0.launch

    Exit code 1: a result is wrong, or the check found an error.

    \b
    Examples
      python -m workbench launch mla_fwd --list
      python -m workbench launch mla-fwd-sm_90a --call "three items"
      python -m workbench launch mla-fwd-sm_90a --save launches
      python -m workbench launch indexer_order --json
    """
    from workbench.small_calls.call import path_of_launch, record
    from workbench.small_calls.table import rows_of

    chosen = [
        (name, row, number, call)
        for name, row in rows_of(kernels).items()
        for number, call in enumerate(row.calls)
        if text in call.name and not (gpu and call.emulated_only)
    ]
    chosen = [one for one in chosen if one[-1].name == text] or chosen
    if not chosen or (gpu and len(chosen) > 1 and not only_list):
        raise ArgumentValueError(f"--call {text}: expected the name of one call; see --list")
    rows: list[dict[str, Any]] = []
    for name, row, number, call in chosen:
        found: dict[str, Any] = {"kernel": name, "call": call.name}
        started = time.monotonic()
        if save is not None:
            path = path_of_launch(save, name, number)
            record(call, row.entry, path)
            found["path"] = str(path)
        elif not only_list:
            found |= judged(call, gpu)
            found["seconds"] = round(time.monotonic() - started, 1)
        rows.append(found)
        if not as_json:
            click.echo(line_of(found))
    if as_json:
        print_json({"calls": rows})
    sys.exit(any(found.get("wrong") or found.get("findings") for found in rows))


def judged(call: Any, gpu: bool) -> dict[str, Any]:
    """Return the faults of its results and the errors of ptxemu's check, no order of additions."""
    from flashdsa.verify.compare import failures
    from workbench.small_calls.call import emulator_of, gpu_of

    runner = gpu_of(call) if gpu else emulator_of(call)
    wrong = failures(call.judge(runner))
    errors = [str(one) for one in getattr(runner, "findings", ()) if one.level == "error"]
    return {"wrong": wrong, "findings": errors}


def line_of(found: dict[str, Any]) -> str:
    """A call for people; one that is right says so, which sanitizers wait for."""
    name = f"{found['kernel']}: {found['call']}"
    if "path" in found:
        return f"{name}: {found['path']}"
    if "wrong" not in found:
        return name
    said = "; ".join((*found["wrong"], *found["findings"]))
    return f"{'WRONG' if said else 'right'} {name} ({found['seconds']} s){said and ': ' + said}"
