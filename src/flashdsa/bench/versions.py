"""Which software took part: versions of Python and of the packages that matter."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("flashdsa", "torch", "numpy", "nvidia-cutlass-dsl")


def versions() -> dict[str, str | None]:
    """Version of Python and of each package; None where a package is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    if package == "flashdsa":
        import flashdsa

        return flashdsa.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return None
