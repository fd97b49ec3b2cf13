"""Contenders of a bench, and what takes their times by turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

Call = Callable[[], object]
Times = TypeVar("Times", covariant=True)
"""Of a call, by the bench's protocol."""


class TurnsTimer(Protocol[Times]):
    """Takes times on a device."""

    def in_turns(self, calls: Mapping[str, Call]) -> Mapping[str, Times]:
        """Times of every call, the calls in random order."""
