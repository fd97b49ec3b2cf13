"""Which transformers flashdsa knows, and parameters by their meaning: releases rename them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from importlib.metadata import version
from typing import Any

from flashdsa.errors import UnsupportedError

TRIED = ("5.17", "5.24")
"""Oldest and newest release that the tests passed with (`make test-newest`). 5.16 has another order
of cache and mask: its results would be wrong."""
RENAMED: Mapping[str, str] = {"past_key_values": "cache"}
"""Parameters' names until 5.23, and their names since."""


def require_version() -> None:
    """Raise UnsupportedError for a transformers that is too old."""
    major_minor = version("transformers").split(".")[:2]
    if [int(part) for part in major_minor] < [int(part) for part in TRIED[0].split(".")]:
        raise unknown("its sparse models keep no latents in their cache")


def require_parameters(
    kind: type, method: str, expected: tuple[str, ...], advice: str = ""
) -> None:
    """Raise UnsupportedError if a method that flashdsa replaces has other parameters than
    `expected`, which are names since 5.24."""
    found = tuple(inspect.signature(getattr(kind, method)).parameters)[1:]
    if tuple(RENAMED.get(name, name) for name in found) != expected:
        raise unknown(
            f"{kind.__name__}.{method}: expected parameters {', '.join(expected)}; got "
            f"{', '.join(found)}{advice}"
        )


def unknown(what: str) -> UnsupportedError:
    """Return the error that says `what` is not as flashdsa knows it, and which releases it
    knows."""
    return UnsupportedError(
        f"{what}. transformers {version('transformers')} is installed; flashdsa knows "
        f"{TRIED[0]} to {TRIED[1]}"
    )


def by_meaning(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, which takes its named arguments by their former names too."""

    @wraps(forward)
    def named(*arguments: Any, **others: Any) -> Any:
        return forward(*arguments, **{RENAMED.get(name, name): x for name, x in others.items()})

    return named
