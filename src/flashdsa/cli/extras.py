"""Packages that only tools need: extras of pyproject.toml bring them, and servers lack them."""

from __future__ import annotations

from importlib import import_module

from flashdsa.errors import UnsupportedError

EXTRAS = {
    "matplotlib": ("bench", "matplotlib>=3.8"),
    "numpy": ("tools", "numpy>=1.26"),
    "elftools": ("tools", "pyelftools>=0.31"),
}
"""Python's name of a package -> the extra that brings it, and pip's requirement."""


def require_extra(what: str, *names: str) -> None:
    """Do nothing if these packages are installed.

    Args:
        what: what needs them, as the error names it.
        names: of `EXTRAS`.

    Raises:
        UnsupportedError: some are missing; says which, the extra and the command.
    """
    missing = []
    for name in names:
        try:
            import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        extras = " and ".join(dict.fromkeys(EXTRAS[name][0] for name in missing))
        packages = " ".join(f"'{EXTRAS[name][1]}'" for name in missing)
        raise UnsupportedError(
            f"{what} needs {', '.join(missing)}, of flashdsa's extra {extras}: "
            f"pip install {packages}"
        )
