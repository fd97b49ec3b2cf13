"""Text for terminals: what files of strangers say moves no cursor there."""

from __future__ import annotations

import re
import sys

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than tab and newline, those that turn the direction of text around, and
bytes of file names that are no text."""


def plain(text: str) -> str:
    r"""Return the text with control characters as they are written in Python: "\x1b"."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def write_out(text: str) -> None:
    """Write to stdout what may hold text of files."""
    sys.stdout.write(plain(text))


def write_err(text: str) -> None:
    """Write to stderr what may hold text of files."""
    sys.stderr.write(plain(text))
