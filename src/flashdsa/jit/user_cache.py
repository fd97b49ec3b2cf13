"""This user's cache of compiled kernels: where it lies, whom it trusts, what is in it.

Objects of the cache are code that runs in this process. One that another user may have written, or
that is not as this package wrote it, is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flashdsa.jit.sources import source_hash
from flashdsa.plan.kernel_spec import Variant

COMPILER, CALLER = "nvidia-cutlass-dsl", "apache-tvm-ffi"
"""Packages that decide what an object of the same sources is, and how its functions are called."""
UNUSED_SECONDS = 86_400
"""Age at which drafts that were left behind, and objects of other versions, are deleted."""


def cache_folder() -> Path:
    """Return the folder that keeps compiled kernels between processes; it need not be there.

    Raises:
        OSError: this user has no folder for caches.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():  # the XDG specification: ignore others
        return named / "flashdsa"
    try:
        home = Path.home()
    except RuntimeError as error:  # no HOME, and no entry of this user's id
        raise FileNotFoundError(f"no folder for a cache: {error}") from error
    if not home.is_absolute():
        raise FileNotFoundError(f"no folder for a cache: HOME is {str(home)!r}")
    return home / ".cache" / "flashdsa"


@cache
def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cache_key(variant: Variant) -> str:
    """Return a hash of all that decides a cached object: sources, machine, compiler and ABI."""
    parts = source_hash([variant]), platform.machine(), *map(package_version, (COMPILER, CALLER))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def file_name(variant: Variant) -> str:
    """Return the name of the variant's object in the cache."""
    return f"{variant.name}-{cache_key(variant)}.so"


def make_private(folder: Path) -> None:
    """Create a folder for this user alone, unless it is there.

    Raises:
        OSError: it cannot be created, or what is there is not trusted.
    """
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(0o700, exist_ok=True)
    require_own(folder, stat.S_ISDIR)


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


def delete_leftovers(folder: Path, names: Collection[str]) -> None:
    """Delete what nobody has used for a day: drafts of processes that were killed, and objects and
    locks whose object is not among `names`."""
    oldest = time.time() - UNUSED_SECONDS
    for path in folder.iterdir():
        with suppress(OSError):  # another process was faster
            if path.lstat().st_mtime > oldest:
                continue
            if path.name.startswith(".building-"):
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix in (".so", ".lock") and path.with_suffix(".so").name not in names:
                path.unlink()
