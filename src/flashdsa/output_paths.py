"""Files and folders to write: tried before the work, written whole or not at all."""

from __future__ import annotations

import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end; a device or a pipe is `path` itself.

    Raises:
        OSError: writing failed; names `path`. What was there is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.resolve()  # a link stays one
    draft = path
    if path.is_file() or not path.exists():
        draft = path.with_name(f".{secrets.token_hex(8)}-{path.name}")
    try:
        yield draft
        draft.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        if draft != path:
            draft.unlink(missing_ok=True)


def _try(name: str, path: Path, *, is_folder: bool) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise _refusal(name, path, error) from error
    try:
        place = path
        if mode is not None and stat.S_ISREG(mode) and not is_folder:
            path.open("ab").close()
            place = path.resolve().parent
        if mode is None or is_folder or place != path:  # else a device, a pipe
            with tempfile.TemporaryDirectory(dir=_nearest(place), prefix=".flashdsa-"):
                pass
    except OSError as error:
        raise _refusal(name, path, error) from error


def _nearest(path: Path) -> Path:
    """The path, or the first of the folders above it that is there."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _refusal(name: str, path: Path, error: OSError) -> ArgumentValueError:
    return ArgumentValueError(f"{name}: cannot write {str(path)!r}: {error.strerror or error}")
