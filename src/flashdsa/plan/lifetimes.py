"""Live ranges of a region's contents: steps of a kernel; ranges that never meet may share
memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


class BudgetError(ValueError):
    """A plan asks for more than the architecture has."""


@dataclass(frozen=True)
class LiveRange:
    """Steps in which a region, or one of its stages, holds one thing.

    Attributes:
        first, last: steps of the kernel's period; if last is before first the range runs on into
            the next period. holds: for people. stage: which one; None: all.
    """

    first: int
    last: int
    holds: str
    stage: int | None = None

    def covers(self, step: int) -> bool:
        """Whether the region holds it in `step`."""
        if self.first <= self.last:
            return self.first <= step <= self.last
        return step >= self.first or step <= self.last


@dataclass(frozen=True)
class Extent:
    """Memory that a region, or a stage of it, occupies in one of its live ranges; None: always."""

    name: str
    start: int
    stop: int
    live: LiveRange | None


def extents_of(
    name: str, start: int, stop: int, stages: int, live_ranges: Sequence[LiveRange]
) -> list[Extent]:
    """The region's extents, one a live range."""
    if not live_ranges:
        return [Extent(name, start, stop, None)]
    size = (stop - start) // stages
    found = []
    for live in live_ranges:
        at = start + size * (live.stage or 0)
        found.append(Extent(name, at, stop if live.stage is None else at + size, live))
    return found


def refuse_conflicts(memory: str, extents: Sequence[Extent]) -> None:
    """Check that no two extents overlap while both are live.

    Raises:
        BudgetError: names both.
    """
    for one, other in combinations(extents, 2):
        if one.stop <= other.start or other.stop <= one.start:
            continue
        if not _never_meet(one.live, other.live):
            raise BudgetError(
                f"{memory}: {_name(one)} [{one.start}, {one.stop}) and {_name(other)} "
                f"[{other.start}, {other.stop}) overlap and are live at the same time"
            )


def _never_meet(one: LiveRange | None, other: LiveRange | None) -> bool:
    if one is None or other is None:
        return False
    # Two ranges meet if and only if one of them covers the other's first step.
    return not (one.covers(other.first) or other.covers(one.first))


def _name(extent: Extent) -> str:
    if extent.live is None or not extent.live.holds:
        return extent.name
    return f"{extent.name} ({extent.live.holds})"
