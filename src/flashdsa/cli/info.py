"""`flashdsa info`: what this machine can run, and why not the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flashdsa.cli.console import json_option, new_console, new_table, print_json, print_table

if TYPE_CHECKING:
    from rich.console import Console

_SHORT = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "e4m3"}
_FLAGS = ("attn_sink", "topk_length", "deterministic", "sorted")


@click.command()
@json_option
def info(as_json: bool) -> None:
    """Show what this machine can run, and why not the rest.

    Prints the machine, the versions, the settings in force (FLASHDSA_* variables) and the table of
    implementations. Paste it into bug reports.

    \b
    Columns of the table
      operation   the public function's kernel
      dtypes      of the main operand
      sizes       limits on head counts, dims and topk; "any" has none
      options     arguments it takes beyond the plain call
      runs here   whether this machine can run it
    Backends without an implementation of an operation are listed below the table.

    \b
    Examples
      flashdsa info
      flashdsa info --json | jq '.implementations[] | select(.runs_here)'
    """
    from flashdsa.bench.machine import describe_machine
    from flashdsa.bench.versions import versions
    from flashdsa.cli.availability import implementation_rows
    from flashdsa.settings import Settings

    machine = describe_machine()
    rows = implementation_rows(machine)
    settings = Settings.from_environment().rows()
    if as_json:
        print_json(
            {
                "machine": machine.as_dict(),
                "versions": versions(),
                "settings": [
                    {"variable": name, "value": value, "help": text}
                    for name, value, text in settings
                ],
                "implementations": rows,
            }
        )
        return
    console = new_console()
    _print_machine(console, machine.as_dict(), versions())
    _print_settings(console, settings)
    _print_implementations(console, rows)
    _print_missing(console, rows)


def _print_machine(console: Console, machine: dict[str, Any], found: dict[str, str | None]) -> None:
    gpus = [f"{g['name']} ({g['capability'][0]}.{g['capability'][1]})" for g in machine["gpus"]]
    cores = f"{machine['logical_cores']} cores, {machine['memory_bytes'] / 2**30:.1f} GiB"
    table = new_table([("", "left"), ("", "wrap")])
    table.show_header = False
    table.add_row("CPU", f"{machine['cpu']}, {cores}")
    table.add_row("GPU", ", ".join(gpus) or "none that torch can use")
    table.add_row("system", machine["system"])
    for name, version in found.items():
        table.add_row(name, version or "not installed")
    print_table(console, "Machine and versions", table)


def _print_settings(console: Console, settings: list[tuple[str, str, str]]) -> None:
    table = new_table([("variable", "left"), ("value", "left"), ("meaning", "wrap")])
    for row in settings:
        table.add_row(*row)
    print_table(console, "Settings", table)


def _print_implementations(console: Console, rows: list[dict[str, Any]]) -> None:
    headings = ("operation", "backend", "dtypes", "sizes", "options", "runs here")
    table = new_table([(h, "left" if h in headings[:2] else "wrap") for h in headings])
    for row in rows:
        if not row["implemented"]:
            continue
        has = row["features"]
        options = [name for name in _FLAGS if has[name]]
        table.add_row(
            row["operation"],
            row["backend"],
            ", ".join(_SHORT.get(name, name) for name in has["dtypes"]),
            _sizes(has),
            ", ".join(options) or "-",
            "yes" if row["runs_here"] else "no: " + "; ".join(row["why_not"]),
        )
    print_table(console, "Implementations", table)


def _sizes(features: dict[str, Any]) -> str:
    limits = {name: features[name] for name in ("num_heads", "d_qk", "d_v", "topk")}
    return (
        ", ".join(f"{name} {limit}" for name, limit in limits.items() if limit != ">= 1") or "any"
    )


def _print_missing(console: Console, rows: list[dict[str, Any]]) -> None:
    """Backends that lack operations, one line each: which, and what the machine lacks for them."""
    table = new_table([(h, "wrap") for h in ("backend", "operations", "why")])
    operations = len({row["operation"] for row in rows})
    for backend in dict.fromkeys(row["backend"] for row in rows):
        missing = [r for r in rows if r["backend"] == backend and not r["implemented"]]
        if missing:
            names = ", ".join(row["operation"] for row in missing)
            names = f"all {operations}" if len(missing) == operations else names
            table.add_row(backend, names, "; ".join(missing[0]["why_not"]))
    if table.row_count:
        print_table(console, "Not in this version", table)
