"""Files and folders that a command is to write, as argparse takes them: tried before the work."""

from __future__ import annotations

import argparse
import secrets
import stat
import sys
import tempfile
from pathlib import Path


def output_file(text: str) -> Path:
    """A file, which is tried and left as it is.

    Raises:
        argparse.ArgumentTypeError: it cannot be written; says why.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file name, got the folder {text!r}")
    _try(path, is_folder=False)
    return path


def output_file_or_stdout(text: str) -> str:
    """A file, or - for stdout."""
    return text if text == "-" else str(output_file(text))


def output_folder(text: str) -> Path:
    """A folder, which need not be there.

    Raises:
        argparse.ArgumentTypeError: nothing can be written there; says why.
    """
    _try(Path(text), is_folder=True)
    return Path(text)


def write_file(path: Path, text: str) -> None:
    """Write a file, all at once or not at all, and make its folder.

    Raises:
        OSError: it cannot be written; names it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.resolve()  # a link stays one
    draft = path  # of a device or a pipe
    if path.is_file() or not path.exists():
        draft = path.with_name(f".{secrets.token_hex(8)}-{path.name}")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if draft != path:
            draft.unlink(missing_ok=True)


def write_file_or_stdout(file: str, text: str) -> None:
    """Write a file, or to stdout for -."""
    if file == "-":
        sys.stdout.write(text)
    else:
        write_file(Path(file), text)


def _try(path: Path, *, is_folder: bool) -> None:
    try:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            mode = None
        if mode is None or is_folder:
            with tempfile.TemporaryDirectory(dir=_nearest(path), prefix=".ptxemu-"):
                pass
        elif stat.S_ISREG(mode):
            path.open("ab").close()
    except OSError as error:
        reason = error.strerror or error
        raise argparse.ArgumentTypeError(f"cannot write {str(path)!r}: {reason}") from error


def _nearest(path: Path) -> Path:
    """The path, or the first of the folders above it that is there."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())
