"""The folder of what ptxemu keeps between processes, and whom it trusts there.

What is kept is code that runs in this process or beside it: nothing that another user may have
written is used.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

DRAFT = ".building-"
"""Prefix of folders in which something is being made."""
UNUSED_SECONDS = 86_400
"""Age at which drafts that were left behind, and what other versions made, are deleted."""


def cache_folder() -> Path:
    """Return $PTXEMU_CACHE, by default ptxemu in $XDG_CACHE_HOME or ~/.cache; make it private.

    Raises:
        OSError: this user has no such folder, it cannot be made, or it is not trusted.
    """
    folder = _named_folder()
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(0o700, exist_ok=True)
    require_own(folder, stat.S_ISDIR)
    return folder


def _named_folder() -> Path:
    named = os.environ.get("PTXEMU_CACHE")
    if named:
        return Path(named).absolute()
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if home.is_absolute():  # the XDG specification: ignore others
        return home / "ptxemu"
    try:
        home = Path.home()
    except RuntimeError as error:  # no HOME, and no entry of this user's id
        raise FileNotFoundError(f"no folder for a cache: {error}") from error
    if not home.is_absolute():
        raise FileNotFoundError(f"no folder for a cache: HOME is {str(home)!r}")
    return home / ".cache" / "ptxemu"


def require_own(path: Path, is_expected: Callable[[int], bool] = stat.S_ISREG) -> None:
    """Require that nobody but this user, or root, can have written a file or a folder.

    Args:
        is_expected: of the mode: is it a file, a folder?

    Raises:
        OSError: it is missing, a link, or of another kind; or others own it or may write to it.
    """
    found = path.lstat()
    if not is_expected(found.st_mode):
        raise PermissionError(f"{path} is not trusted: {stat.filemode(found.st_mode)}")
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} is not trusted: it belongs to the user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path} is not trusted: others may write to it; if its contents are yours: "
            f"chmod go-w {path}"
        )


def delete_unused(folder: Path, prefix: str, seconds: float = UNUSED_SECONDS) -> None:
    """Delete what is in `folder`, begins with `prefix` and has not been used for so long."""
    oldest = time.time() - seconds
    for path in folder.glob(f"{prefix}*"):
        with suppress(OSError):  # another process was faster
            if path.lstat().st_mtime > oldest:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
