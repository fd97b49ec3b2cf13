"""Warps that sleep until something happens, so that nobody asks them before."""

from __future__ import annotations

from typing import Protocol


class Sleeper(Protocol):
    """A warp."""

    def wake(self) -> None:
        """Let the scheduler ask it again."""
        ...


class Sleepers:
    """The warps that wait for one thing to change: a phase, an operation, the lanes of a cluster.

    Whoever changes it calls `wake`; the scheduler then asks each of the warps again whether it can
    go on. To wake a warp too early costs time and nothing else; one that is not woken never runs.
    """

    __slots__ = ("_warps",)

    def __init__(self) -> None:
        self._warps: set[Sleeper] | None = None

    def add(self, warp: Sleeper) -> None:
        """`warp` sleeps from now on."""
        if self._warps is None:
            self._warps = set()
        self._warps.add(warp)

    def wake(self) -> None:
        """It has changed."""
        if self._warps:
            for warp in self._warps:
                warp.wake()
            self._warps.clear()
