"""What the benches of forward and decode report alike: file, exit code, FlashMLA, findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console


def report(
    result: Any, target: str, out: Path | None, as_json: bool, show: Callable[[Any], None]
) -> None:
    """Write the result and show it; exit code 1 where a row has findings.

    Args:
        result: of `run_forward_bench`, say. out: its file, or None: by target and
            date. show: prints the table.
    """
    from flashdsa.bench.document import write_text
    from flashdsa.bench.runner import result_path

    path = result_path(result, target, out)
    write_text(result.to_json(), path)
    if as_json:
        click.echo(result.to_json(), nl=False)
    else:
        show(result)
        click.echo(f"result: {path}")
    if any(row.findings for row in result.rows):
        raise click.exceptions.Exit(1)


def print_notes(console: Console, rows: Sequence[Any]) -> None:
    """Why FlashMLA is missing, each reason once, and what is wrong with our results."""
    for reason in dict.fromkeys(row.peer_missing for row in rows if row.peer_missing):
        names = [row.name for row in rows if row.peer_missing == reason]
        console.print(f"no FlashMLA ({len(names)} cases, {names[0]}): {reason}", markup=False)
    print_findings(console, rows)


def print_findings(console: Console, rows: Sequence[Any]) -> None:
    """What is wrong with our results."""
    for row in rows:
        for finding in row.findings:
            console.print(f"{row.name}: {finding}", style="bold red", markup=False)
