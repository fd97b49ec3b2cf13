"""What the commands share on the screen: progress on stderr, tables and JSON on stdout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_COLUMNS = 100
OnProgress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what runs now)."""

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
    """A console that does not colour numbers and paths on its own; 100 columns in a pipe."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


def new_table(title: str | None, columns: Iterable[tuple[str, str]]) -> Table:
    """A plain table; each column is (heading, "left" or "right"). The first column never wraps."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for place, (heading, justify) in enumerate(columns):
        right = justify == "right"
        table.add_column(heading, justify="right" if right else "left", no_wrap=right or place == 0)
    return table


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """A bar on stderr. Where stderr is no terminal nothing is drawn."""
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    console = new_console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=None)

        def on_progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield on_progress
