"""Files and folders that are to be written: tried before the work, nothing left behind."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flashdsa.errors import ArgumentValueError


def require_creatable(name: str, path: Path, suffixes: Sequence[str] = ()) -> None:
    """A file can be written at `path`, whose name ends in one of `suffixes`; none: any.

    Raises:
        ArgumentValueError: says why not, under `name`.
    """
    if suffixes and path.suffix.lower() not in suffixes:
        raise ArgumentValueError(
            f"{name}: expected a name ending in {', '.join(suffixes)}, got {str(path)!r}"
        )
    if path.is_dir():
        raise ArgumentValueError(f"{name}: expected a file name, got the folder {str(path)!r}")
    _try(name, path, is_folder=False)


def require_creatable_folder(name: str, path: Path) -> None:
    """Files can be written in the folder `path`, which need not be there.

    Raises:
        ArgumentValueError: says why not, under `name`.
    """
    _try(name, path, is_folder=True)


def _try(name: str, path: Path, *, is_folder: bool) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise _refusal(name, path, error) from error
    try:
        if mode is None or is_folder:
            with tempfile.TemporaryDirectory(dir=_nearest(path), prefix=".flashdsa-"):
                pass
        elif stat.S_ISREG(mode):
            path.open("ab").close()
    except OSError as error:
        raise _refusal(name, path, error) from error


def _nearest(path: Path) -> Path:
    """The path, or the first of the folders above it that is there."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _refusal(name: str, path: Path, error: OSError) -> ArgumentValueError:
    return ArgumentValueError(f"{name}: cannot write {str(path)!r}: {error.strerror or error}")
