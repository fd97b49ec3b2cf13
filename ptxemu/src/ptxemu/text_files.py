"""Files that users name: their text, or a sentence about what they are instead."""

from __future__ import annotations

from pathlib import Path

from ptxemu.errors import UnreadableFileError


def read_text(path: Path, what: str) -> str:
    """The text of a file; `what` names what it should hold, as "PTX".

    Raises:
        UnreadableFileError: names the file and says what it is instead.
    """
    if path.is_dir():
        raise UnreadableFileError(f"{path}: a folder; expected a file of {what}")
    if not path.exists():
        raise UnreadableFileError(f"{path}: no such file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UnreadableFileError(f"{path}: not text but bytes; expected {what}") from None
