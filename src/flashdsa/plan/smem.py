"""Shared memory as a list of regions: their offsets, and an error that shows the whole table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


class BudgetError(ValueError):
    """A plan asks for more than the architecture has."""


@dataclass(frozen=True)
class Extent:
    """What a region occupies, bytes or columns, and when: see SmemRegion.live."""

    name: str
    start: int
    stop: int
    live: tuple[int, int] | None


def refuse_conflicts(memory: str, extents: Sequence[Extent]) -> None:
    """Check that no two extents overlap while both are live.

    Raises:
        BudgetError: names both.
    """
    for one, other in combinations(extents, 2):
        apart = one.stop <= other.start or other.stop <= one.start
        if apart or _in_turns(one.live, other.live):
            continue
        raise BudgetError(
            f"{memory}: {one.name} [{one.start}, {one.stop}) and {other.name} "
            f"[{other.start}, {other.stop}) overlap and are live at the same time"
        )


def _in_turns(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    if one is None or other is None:
        return False
    return one[1] < other[0] or other[1] < one[0]


@dataclass(frozen=True)
class SmemRegion:
    """A named piece of a CTA's shared memory.

    Attributes:
        bytes: size. align: of its start, a power of two. holds: what lies there, for people.
        overlays: the region at whose start it lies; it may reach over those that follow.
        live: first and last step of the kernel in which it holds something; None: always.
    """

    name: str
    bytes: int
    align: int
    holds: str
    overlays: str = ""
    live: tuple[int, int] | None = None


@dataclass(frozen=True)
class SmemPlan:
    """Regions with their offsets from a base that is aligned to 1024 bytes."""

    regions: tuple[SmemRegion, ...]
    offsets: tuple[int, ...]
    total: int
    capacity: int

    def offset(self, name: str) -> int:
        """Bytes from the base to the region."""
        return self.offsets[self._index(name)]

    def size(self, name: str) -> int:
        """Bytes of the region."""
        return self.regions[self._index(name)].bytes

    def _index(self, name: str) -> int:
        for index, region in enumerate(self.regions):
            if region.name == name:
                return index
        raise KeyError(f"no region {name!r} in this plan")


def plan_smem(regions: Sequence[SmemRegion], capacity: int) -> SmemPlan:
    """Lay regions out in their order.

    Raises:
        BudgetError: they exceed `capacity` bytes; shows every region with its offset. Or two that
            share bytes are live in the same step.
    """
    offsets: list[int] = []
    end = 0
    for region in regions:
        start = -(-end // region.align) * region.align
        if region.overlays:
            start = offsets[[other.name for other in regions].index(region.overlays)]
        offsets.append(start)
        end = max(end, start + region.bytes)
    refuse_conflicts(
        "shared memory",
        [
            Extent(region.name, start, start + region.bytes, region.live)
            for region, start in zip(regions, offsets, strict=True)
        ],
    )
    plan = SmemPlan(tuple(regions), tuple(offsets), end, capacity)
    if end > capacity:
        first = next(r for r, at in zip(regions, offsets, strict=True) if at + r.bytes > capacity)
        table = "; ".join(
            f"{r.name} at {at}: {r.bytes}" for r, at in zip(regions, offsets, strict=True)
        )
        raise BudgetError(
            f"shared memory: {end} bytes planned, {capacity} available; "
            f"{first.name} is the first region beyond. {table}"
        )
    return plan
