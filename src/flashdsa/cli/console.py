"""Shared output of the commands: progress on stderr, tables and JSON on stdout."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import click

from flashdsa.cli import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

RIGHT, LEFT, WRAP = "right", "left", "wrap"
Rows = list[tuple[str, ...]]
PLAIN_SECONDS = 10.0
OnProgress = Callable[[float, int, str], None]
"""Called with (steps done, a part of one perhaps, steps in all, what runs now)."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on stdout and nothing else."
)


def print_json(document: Any) -> None:
    """The document on stdout. NaN and infinities become text: JSON has no word for them."""
    click.echo(json.dumps(_json_ready(document), indent=2, allow_nan=False))


def _json_ready(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def new_console(stderr: bool = False) -> Console:
    """Return a console that does not colour numbers and paths on its own.

    In a pipe it is 100 columns wide, or COLUMNS if that is set. Without rich (the extra `bench`) it
    is a `PlainConsole`, which has no colours.
    """
    try:
        from rich.console import Console
    except ImportError:
        return cast("Console", plain.PlainConsole(stderr))
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = plain.PIPE_COLUMNS
    return console


def new_table(columns: Iterable[tuple[str, str]]) -> Table:
    """A plain table; each column is (heading, "left" or "right" or "wrap": left, in many lines)."""
    try:
        from rich import box
        from rich.table import Table
    except ImportError:
        return cast("Table", plain.PlainTable(columns))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading, kind in columns:
        justify: Literal["left", "right"] = "right" if kind == "right" else "left"
        wraps = kind == "wrap"  # a word longer than the column, a path, is folded, not cut
        table.add_column(
            heading, justify=justify, no_wrap=not wraps, overflow="fold" if wraps else "ellipsis"
        )
    return table


def escape(text: str) -> str:
    """Return the text with its brackets as they are, for a console that takes markup."""
    try:
        from rich.markup import escape as rich_escape
    except ImportError:
        return plain.escape(text)
    return rich_escape(text)


def print_indented(console: Console, what: str | Table, columns: int = 2) -> None:
    """Print a text or a table with `columns` spaces to its left."""
    try:
        from rich.padding import Padding
    except ImportError:
        cast("plain.PlainConsole", console).print(cast("Any", what), indent=columns)
    else:
        console.print(Padding(what, (0, 0, 0, columns)))


def print_table(console: Console, title: str, table: Table) -> None:
    """A bold title, the table under it, an empty line."""
    console.print(title, style="bold", markup=False)
    console.print(table)
    console.print()


class TextTable(NamedTuple):
    """A table: its columns as `new_table` takes them, its rows, and a line under it."""

    title: str
    columns: list[tuple[str, str]]
    rows: Rows
    note: str = ""


def print_tables(
    console: Console, tables: Iterable[TextTable], colours: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Each table, its note under it; cells that `colours` names are in colour."""

    def shown(cell: str) -> str:
        return f"[{colours[cell]}]{cell}[/]" if cell in colours else escape(cell)

    for title, columns, rows, note in tables:
        table = new_table(columns)
        for row in rows:
            table.add_row(*map(shown, row))
        print_table(console, title, table)
        if note:
            console.print(note + "\n", markup=False)


def table_as_markdown(table: TextTable) -> str:
    """A bold title, the table under it, its note."""
    lines = [" | ".join(name for name, _ in table.columns)]
    lines.append(" | ".join("--:" if kind == RIGHT else "---" for _, kind in table.columns))
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in table.rows]
    parts = [f"**{table.title}**", "\n".join(f"| {line} |" for line in lines), table.note]
    return "\n\n".join(part for part in parts if part)


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """A bar on stderr; without a terminal or rich, a line every PLAIN_SECONDS instead."""
    console = new_console(stderr=True)
    if not console.is_terminal:
        with _plain_progress() as on_progress:
            yield on_progress
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    what_runs = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # what the others leave
    columns = (
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", table_column=what_runs),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("starting", total=None)

        def on_progress(done: float, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield on_progress


@contextmanager
def _plain_progress() -> Iterator[OnProgress]:
    """Every PLAIN_SECONDS a line that says how far it is, and for how long the same step runs."""
    what_runs, step, since = "", -1, time.monotonic()
    over = threading.Event()

    def tell() -> None:
        while not over.wait(PLAIN_SECONDS):
            seconds = time.monotonic() - since
            if what_runs:
                running = f" ({seconds:.0f} s)" if seconds >= PLAIN_SECONDS else ""
                click.echo(f"{what_runs}{running}", err=True)

    def on_progress(done: float, total: int, what: str) -> None:
        nonlocal what_runs, step, since
        what_runs = f"{done / max(total, 1):4.0%} {what}"
        if int(done) != step:
            step, since = int(done), time.monotonic()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield on_progress
    finally:
        over.set()
        teller.join()
