"""Packages that only tools need: extras of pyproject.toml bring them, and servers lack them."""

from __future__ import annotations

EXTRAS = {
    "matplotlib": ("bench", "matplotlib>=3.8"),
    "numpy": ("tools", "numpy>=1.26"),
    "elftools": ("tools", "pyelftools>=0.31"),
}
"""Python's name of a package -> the extra that brings it, and pip's requirement."""


def say_missing(name: str) -> str:
    """Say which extra brings one of `EXTRAS`, and the command that installs it."""
    extra, requirement = EXTRAS[name]
    return f"needs {name}, of flashdsa's extra {extra}: pip install '{requirement}'"
