"""Tables and text of the commands where rich is not installed: the same words without colours."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable
from itertools import zip_longest

import click

PIPE_COLUMNS = 100
LEAST_WIDTH = 12
"""Characters that a wrapped column keeps."""
GAP = "   "
_TAG = re.compile(r"(?<!\\)\[(?:/|bold|green|yellow|red)[a-z ]*\]")


def escape(text: str) -> str:
    """Return the text with brackets that are no markup, as `PlainConsole.print` takes it."""
    return text.replace("[", "\\[")


def without_markup(text: str) -> str:
    """Return the text without tags such as [bold red] and [/], and with its own brackets."""
    return _TAG.sub("", text).replace("\\[", "[")


class PlainTable:
    """A table of text, with the calls of `rich.table.Table` that commands make.

    Args:
        columns: as `flashdsa.cli.console.new_table` takes them.
    """

    def __init__(self, columns: Iterable[tuple[str, str]]) -> None:
        names, self._kinds = zip(*columns, strict=True)
        self._heading: tuple[str, ...] = names
        self._rows: list[tuple[str, ...]] = []
        self.show_header = True

    def add_row(self, *cells: str) -> None:
        """Add a row; cells may have markup and several lines."""
        self._rows.append(tuple(map(without_markup, cells)))

    def add_section(self) -> None:
        """Add an empty row."""
        self._rows.append(("",) * len(self._kinds))

    def lines(self, width: int) -> list[str]:
        """Return the lines; columns of kind "wrap" share what the others leave of `width`."""
        rows = [self._heading, *self._rows] if self.show_header else self._rows
        widths = self._widths(rows, width)
        shown = [self._shown(row, widths) for row in rows]
        if self.show_header:
            shown.insert(1, [GAP.join("-" * one for one in widths)])
        return [line for row in shown for line in row]

    def _widths(self, rows: list[tuple[str, ...]], width: int) -> list[int]:
        widths = [max(map(len, "\n".join(cells).split("\n"))) for cells in zip(*rows, strict=True)]
        wrapped = [number for number, kind in enumerate(self._kinds) if kind == "wrap"]
        over = sum(widths) + len(GAP) * (len(widths) - 1) - width
        for _ in range(over):
            widest = max(wrapped, key=widths.__getitem__, default=None)
            if widest is None or widths[widest] <= LEAST_WIDTH:
                break
            widths[widest] -= 1
        return widths

    def _shown(self, row: tuple[str, ...], widths: list[int]) -> list[str]:
        cells = []
        for text, width, kind in zip(row, widths, self._kinds, strict=True):
            folded = text.split("\n")
            if kind == "wrap":
                folded = [part for line in folded for part in textwrap.wrap(line, width) or [""]]
            align = str.rjust if kind == "right" else str.ljust
            cells.append([align(part, width) for part in folded])
        lines = zip_longest(*cells)
        return [
            GAP.join(
                " " * width if part is None else part
                for part, width in zip(line, widths, strict=True)
            ).rstrip()
            for line in lines
        ]


class PlainConsole:
    """Prints lines, with the calls of `rich.console.Console` that commands make."""

    is_terminal = False

    def __init__(self, stderr: bool = False) -> None:
        self._stderr = stderr
        self.width = shutil.get_terminal_size((PIPE_COLUMNS, 0)).columns

    def print(
        self,
        what: str | PlainTable = "",
        *,
        indent: int = 0,
        markup: bool = True,
        soft_wrap: bool = False,
        **_: object,
    ) -> None:
        """Print a text or a table.

        Args:
            indent: columns to the left of it.
            markup: tags are left out; otherwise brackets are text.
            soft_wrap: long lines are the terminal's to wrap.
            _: style and highlight, which have no meaning here.
        """
        width = self.width - indent
        if isinstance(what, PlainTable):
            lines = what.lines(width)
        else:
            lines = (without_markup(what) if markup else what).split("\n")
            if not soft_wrap:
                lines = [part for line in lines for part in textwrap.wrap(line, width) or [""]]
        click.echo("\n".join(" " * indent * bool(line) + line for line in lines), err=self._stderr)
