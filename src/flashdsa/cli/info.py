"""`flashdsa info`: what this machine can run, and why not the rest."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

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
from flashdsa.problem import PAGE_SIZE

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


@click.command()
@json_option
def info(as_json: bool) -> None:
    """Show what this machine can run, and why not the rest.

    Prints the machine, the versions, the settings in force (FLASHDSA_* variables), where compiled
    kernels come from and, for each backend, whether it runs here and what it takes. Paste it into
    bug reports.

    \b
    Columns of a backend's table
      operations          the public functions
      dtypes              of the main operand
      sizes and options   limits on head counts, dims and topk (without one any is
                          taken), and arguments it takes beyond the plain call

    \b
    Examples
      flashdsa info
      flashdsa info --json | jq '.implementations[] | select(.runs_here)'
    """
    from flashdsa.bench.machine import describe_machine, versions
    from flashdsa.cli.availability import implementation_rows
    from flashdsa.jit.origins import kernel_origins
    from flashdsa.settings import Settings

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
    _print_machine(console, machine.as_dict(), versions(), kernels)
    _print_settings(console, settings)
    _print_backends(console, rows)


def _print_machine(
    console: Console,
    machine: dict[str, Any],
    found: dict[str, str | None],
    kernels: list[dict[str, Any]],
) -> None:
    gpus = [f"{g['name']} ({g['capability'][0]}.{g['capability'][1]})" for g in machine["gpus"]]
    cores = f"{machine['logical_cores']} cores, {machine['memory_bytes'] / 2**30:.1f} GiB"
    table = new_table([("", "left"), ("", "wrap")])
    table.show_header = False
    table.add_row("CPU", f"{machine['cpu']}, {cores}")
    table.add_row("GPU", ", ".join(gpus) or "none that torch can use")
    table.add_row("system", machine["system"])
    for name, version in found.items():
        table.add_row(name, version or "not installed")
    for row in kernels:
        table.add_row(f"kernels of {row['backend']}", _kernels_said(row))
    print_table(console, "Machine and versions", table)


def _print_settings(console: Console, settings: list[tuple[str, str, str]]) -> None:
    table = new_table([("variable", "left"), ("value", "left"), ("meaning", "wrap")])
    for row in settings:
        table.add_row(*row)
    print_table(console, "Settings", table)


def _kernels_said(row: dict[str, Any]) -> str:
    """Return the number of a backend's functions by origin; --json names them."""
    count = Counter(row["functions"].values())
    said = [f"{number} {origin}" for origin, number in count.items()]
    if row["object"]:
        where = f"{row['object']}, {row['bytes'] / 1e6:.1f} MB"
        said.append(where if row["state"] == "used" else f"{where}: {row['state']}, not used")
    return "; ".join(said)


def _print_backends(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print what each backend takes, and once whether it runs here and why not."""

    def indented(what: str | Table) -> None:
        print_indented(console, what)

    for backend in dict.fromkeys(row["backend"] for row in rows):
        own = [row for row in rows if row["backend"] == backend]
        there = [row for row in own if row["implemented"]]
        console.print(f"[bold]{backend}[/] {escape(_verdict(own))}")
        if there and backend.startswith("emulate-"):
            of = backend.removeprefix("emulate-")
            indented(f"the kernels of {of} on CPU tensors, run and checked by ptxemu")
        elif there and backend == "torch":
            indented("what cpu takes, by plain torch on any device; auto takes it last")
        elif there:
            indented(_operations_table(there))
            lacking = [row["operation"] for row in own if not row["implemented"]]
            if lacking:
                indented(f"not in this version: {', '.join(lacking)}")
        console.print()


def _verdict(rows: list[dict[str, Any]]) -> str:
    there = [row for row in rows if row["implemented"]]
    if not there:
        return f"does not run here: {rows[0]['why_not'][0]}"
    if there[0]["runs_here"]:
        return "runs here"
    return f"does not run here: {'; '.join(there[0]['why_not'])}"


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
