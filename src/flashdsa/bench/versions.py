"""Versions of the software that took part: Python and the packages that matter."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("flashdsa", "torch", "numpy", "nvidia-cutlass-dsl")


def versions(*more: str) -> dict[str, str | None]:
    """Version of Python, of each of PACKAGES and of `more`; None where one is not installed."""
    names = (*PACKAGES, *more)
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


def _version(package: str) -> str | None:
    if package == "flashdsa":
        import flashdsa

        return flashdsa.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None
