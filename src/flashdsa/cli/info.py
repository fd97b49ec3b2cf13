"""`flashdsa info`: what this machine can run, and why not the rest."""

from __future__ import annotations

from collections import Counter
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from flashdsa.backends.emulated.packages import install_command
from flashdsa.backends.features import FLAGS
from flashdsa.cli.console import (
    escape,
    json_option,
    new_console,
    new_table,
    print_indented,
    print_json,
    print_table,
)
from flashdsa.jit.origins import NONE
from flashdsa.problem import PAGE_SIZE
from flashdsa.settings import BACKENDS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SHORT = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "e4m3",
}
_NAME_WIDTH = 2 + max(map(len, BACKENDS))


@click.command()
@click.argument("backend", required=False, type=click.Choice(BACKENDS[1:]))
@click.option("--all", "all_backends", is_flag=True, help="The tables of every backend, too.")
@json_option
def info(backend: str | None, all_backends: bool, as_json: bool) -> None:
    """Show what this machine can run, and why not the rest.

    Prints the versions, the machine, settings that are set (FLASHDSA_* variables) and, for each
    backend, whether it runs here, else why not and what to install. With BACKEND also what that
    backend takes and where its compiled kernels come from; with --all the same for every backend,
    and all settings. Paste it into bug reports.

    \b
    Columns of a backend's table
      operations          the public functions
      dtypes              of the main operand
      sizes and options   limits on head counts, dims and topk (without one any is
                          taken), and arguments it takes beyond the plain call

    \b
    Examples
      flashdsa info
      flashdsa info sm90
      flashdsa info --json | jq '.implementations[] | select(.runs_here)'
    """
    from flashdsa.bench.machine import describe_machine, versions
    from flashdsa.cli.availability import implementation_rows
    from flashdsa.jit.origins import kernel_origins
    from flashdsa.settings import Settings

    if as_json and (backend or all_backends):
        raise click.UsageError("--json: has everything; not together with BACKEND or --all")
    machine = describe_machine()
    rows = implementation_rows(machine)
    settings = Settings.from_environment().rows()
    kernels = kernel_origins()
    if as_json:
        print_json(
            {
                "machine": machine.as_dict(),
                "versions": versions(),
                "settings": [
                    {"variable": name, "value": value, "help": text}
                    for name, value, text in settings
                ],
                "kernels": kernels,
                "implementations": rows,
            }
        )
        return
    console = new_console()
    said_of_kernels = {row["backend"]: _say_kernels(row) for row in kernels}
    with_object = {row["backend"] for row in kernels if row["object"]}
    without_kernels = {row["backend"] for row in kernels if {*row["functions"].values()} == {NONE}}
    defaults = Settings().rows()
    changed = [f"{row[0]}={row[1]}" for row in settings if row not in defaults]
    for line in (_say_versions(versions()), _say_machine(machine.as_dict()), *changed):
        console.print(_in_lines(line, console), markup=False)
    console.print()
    shown = [backend] if backend else BACKENDS[1:] if all_backends else []
    for name, own in _by_backend(rows).items():
        verdict = _verdict(own)
        if own[0]["runs_here"] and name in without_kernels:
            verdict = f"no: {said_of_kernels[name]}"
        elif name in said_of_kernels and (own[0]["runs_here"] or name in with_object):
            verdict = f"{verdict}; {said_of_kernels[name]}"
        if backend in (None, name):
            line = f"{name:<{_NAME_WIDTH}}{verdict}"
            console.print(_in_lines(line, console, _NAME_WIDTH), markup=False)
    console.print()
    if not shown:
        console.print("What each takes: flashdsa info BACKEND, or --all", markup=False)
    if all_backends:
        _print_settings(console, settings)
    for name, own in _by_backend(rows).items():
        if name in shown:
            _print_backend(console, name, own, said_of_kernels.get(name))


def _in_lines(text: str, console: Console, indent: int = 0) -> str:
    """Fold a text to the console's width; its further lines are indented."""
    return fill(text, console.width, subsequent_indent=" " * indent, break_on_hyphens=False)


def _by_backend(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return each backend's rows, those that it implements first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: not row["implemented"]):
        found.setdefault(row["backend"], []).append(row)
    return {name: found[name] for name in BACKENDS if name in found}


def _say_versions(found: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())


def _say_machine(machine: dict[str, Any]) -> str:
    gpus = [f"{g['name']} ({g['capability'][0]}.{g['capability'][1]})" for g in machine["gpus"]]
    cores = f"{machine['logical_cores']} cores, {machine['memory_bytes'] / 2**30:.1f} GiB"
    gpu = ", ".join(gpus) or "none that torch can use"
    return f"{machine['cpu']}, {cores}, {machine['system']}; GPU: {gpu}"


def _print_settings(console: Console, settings: list[tuple[str, str, str]]) -> None:
    table = new_table([("variable", "left"), ("value", "left"), ("meaning", "wrap")])
    for row in settings:
        table.add_row(*row)
    print_table(console, "Settings", table)


def _say_kernels(row: dict[str, Any]) -> str:
    """Say how many of a backend's kernels have each origin; --json names them."""
    count = Counter(row["functions"].values())
    said = [f"{number} {origin}" for origin, number in count.items() if origin != NONE]
    if count[NONE]:
        which = f"{count[NONE]} not" if said else f"{count[NONE]}, none"
        said.append(f"{which} compiled: {install_command(['cutlass'])} compiles them")
    if row["object"]:
        where = f"{row['object']}, {row['bytes'] / 1e6:.1f} MB"
        said.append(where if row["state"] == "used" else f"{where}: {row['state']}, not used")
    return f"kernels: {'; '.join(said)}"


def _print_backend(
    console: Console, backend: str, rows: list[dict[str, Any]], kernels: str | None
) -> None:
    """Print what a backend takes, and where its kernels come from."""
    console.print(backend, style="bold")
    if kernels:
        print_indented(console, escape(kernels))
    if backend.startswith("emulate-"):
        of = backend.removeprefix("emulate-")
        print_indented(console, f"what {of} takes, on CPU tensors, run and checked by ptxemu")
    elif backend == "torch":
        print_indented(console, "what cpu takes, by plain torch on any device; auto takes it last")
    else:
        print_indented(console, _operations_table([row for row in rows if row["implemented"]]))
        lacking = [row["operation"] for row in rows if not row["implemented"]]
        if lacking:
            print_indented(console, f"not in this version: {', '.join(lacking)}")
    console.print()


def _verdict(rows: list[dict[str, Any]]) -> str:
    """Say whether a backend runs here, else why not, by its first implementation."""
    if not rows[0]["runs_here"]:
        return f"no: {'; '.join(rows[0]['why_not'])}"
    return {"torch": "yes, on any device; auto takes it last"}.get(rows[0]["backend"], "yes")


def _operations_table(rows: list[dict[str, Any]]) -> Table:
    """A row for all operations with the same features."""
    operations: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        has = row["features"]
        options = [name for name in FLAGS if has[name]]
        if has["row_formats"]:
            options.append("packed_kv")  # --json names the formats
        if has["table_page_size"] != str(PAGE_SIZE):
            options.append("table_page_size")  # and the sizes
        dtypes = ", ".join(_SHORT.get(name, name) for name in has["dtypes"])
        takes = "; ".join([*_sizes(has), *([", ".join(options)] if options else [])]) or "-"
        operations.setdefault((dtypes, takes), []).append(row["operation"])
    table = new_table([("operations", "left"), ("dtypes", "left"), ("sizes and options", "wrap")])
    for (dtypes, takes), names in operations.items():
        table.add_row("\n".join(names), dtypes, takes)
    return table


def _sizes(features: dict[str, Any]) -> list[str]:
    limits = {name: features[name] for name in ("num_heads", "d_qk", "d_v", "topk")}
    return [f"{name} {limit}" for name, limit in limits.items() if limit != ">= 1"]
