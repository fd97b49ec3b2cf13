"""Help that fits the terminal: prose is filled, lists stay lists."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from itertools import groupby

MOST_COLUMNS = 100
"""Longer lines are hard to read, however wide the terminal is."""
_COLUMNS = re.compile(r" +\S.*?  +(?=\S)")
"""Matches a list's line up to its last column's text."""


def columns() -> int:
    """The width of text in this terminal."""
    return min(shutil.get_terminal_size().columns, MOST_COLUMNS)


class HelpFormatter(argparse.HelpFormatter):
    """Formats descriptions and the help of options: see `fitted`."""

    def __init__(self, prog: str) -> None:
        """Take the argument that argparse passes."""
        super().__init__(prog, width=columns() - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in fitted(text, width - len(indent)))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return fitted(text, width)


def fitted(text: str, width: int) -> list[str]:
    """Lines of at most `width`, where words allow it.

    Neighbouring lines are a paragraph; one that begins with a space is an item of a list, which
    goes on below its text.
    """
    lines: list[str] = []
    for is_prose, group in groupby(text.splitlines(), lambda line: line[:1].strip() != ""):
        pieces = [*group]
        for piece in [" ".join(pieces)] if is_prose else pieces:
            found = _COLUMNS.match(piece)
            hang = "" if is_prose else " " * (found.end() if found else _indent(piece) + 4)
            lines += _wrap(piece, width, hang) or [""]
    return lines


def folded(lines: Iterable[str]) -> list[str]:
    """Long lines of a report, each on several of a terminal; elsewhere, for tools, as they are."""
    if not sys.stdout.isatty():
        return [*lines]
    return [
        part
        for line in lines
        for piece in line.splitlines()
        for part in _wrap(piece, columns(), "    ") or [""]
    ]


def _wrap(piece: str, width: int, hang: str) -> list[str]:
    return textwrap.wrap(
        piece, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False
    )


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
