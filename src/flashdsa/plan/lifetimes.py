"""When a region holds what: ranges of a kernel's steps, which may share memory only in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


class BudgetError(ValueError):
    """A plan asks for more than the architecture has."""


@dataclass(frozen=True)
class Turn:
    """Steps in which a region, or one of its equal pieces, holds one thing.

    Attributes:
        first, last: steps of the kernel's period; with last before first the range runs on into
            the next period. holds: for people. piece: which one; None: all.
    """

    first: int
    last: int
    holds: str
    piece: int | None = None

    def covers(self, step: int) -> bool:
        """Whether the region holds it in `step`."""
        if self.first <= self.last:
            return self.first <= step <= self.last
        return step >= self.first or step <= self.last


@dataclass(frozen=True)
class Extent:
    """What a region, or a piece of it, occupies in one of its turns; no turn: always."""

    name: str
    start: int
    stop: int
    turn: Turn | None


def extents_of(
    name: str, start: int, stop: int, pieces: int, turns: Sequence[Turn]
) -> list[Extent]:
    """The region's extents, one a turn."""
    if not turns:
        return [Extent(name, start, stop, None)]
    size = (stop - start) // pieces
    found = []
    for turn in turns:
        at = start + size * (turn.piece or 0)
        found.append(Extent(name, at, stop if turn.piece is None else at + size, turn))
    return found


def refuse_conflicts(memory: str, extents: Sequence[Extent]) -> None:
    """Check that no two extents overlap while both are live.

    Raises:
        BudgetError: names both.
    """
    for one, other in combinations(extents, 2):
        if one.stop <= other.start or other.stop <= one.start:
            continue
        if not _in_turns(one.turn, other.turn):
            raise BudgetError(
                f"{memory}: {_name(one)} [{one.start}, {one.stop}) and {_name(other)} "
                f"[{other.start}, {other.stop}) overlap and are live at the same time"
            )


def _in_turns(one: Turn | None, other: Turn | None) -> bool:
    if one is None or other is None:
        return False
    # Two ranges meet if and only if one of them covers the other's first step.
    return not (one.covers(other.first) or other.covers(one.first))


def _name(extent: Extent) -> str:
    if extent.turn is None or not extent.turn.holds:
        return extent.name
    return f"{extent.name} ({extent.turn.holds})"
