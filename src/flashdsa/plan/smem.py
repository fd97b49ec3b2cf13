"""Shared memory as a list of regions: their offsets, and an error that shows the whole table.

Contents live in steps of a kernel; regions whose live ranges never meet may share memory.
"""

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


@dataclass(frozen=True)
class SmemRegion:
    """A named piece of a CTA's shared memory.

    Attributes:
        bytes: size. align: of its start, a power of two. holds: its contents, for people.
        overlays: the region at whose start it lies; it may reach over those that follow.
        live: the steps of the kernel in which it holds something; none: always.
        stages: equal parts, which live ranges may name.
    """

    name: str
    bytes: int
    align: int
    holds: str
    overlays: str = ""
    live: tuple[LiveRange, ...] = ()
    stages: int = 1


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
        return self.regions[self._index(name)].bytes

    def _index(self, name: str) -> int:
        for index, region in enumerate(self.regions):
            if region.name == name:
                return index
        raise KeyError(f"no region {name!r} in this plan")


def lay_out(regions: Sequence[SmemRegion]) -> tuple[tuple[int, ...], int]:
    """The regions' offsets in their order, and the bytes of all; nothing is checked."""
    offsets: list[int] = []
    end = 0
    for region in regions:
        start = -(-end // region.align) * region.align
        if region.overlays:
            start = offsets[[other.name for other in regions].index(region.overlays)]
        offsets.append(start)
        end = max(end, start + region.bytes)
    return tuple(offsets), end


def plan_smem(regions: Sequence[SmemRegion], capacity: int) -> SmemPlan:
    """Lay regions out in their order.

    Raises:
        BudgetError: they exceed `capacity` bytes; shows every region with its offset. Or two that
            share bytes are live in the same step.
    """
    offsets, end = lay_out(regions)
    refuse_conflicts(
        "shared memory",
        [
            extent
            for region, start in zip(regions, offsets, strict=True)
            for extent in extents_of(
                region.name, start, start + region.bytes, region.stages, region.live
            )
        ],
    )
    plan = SmemPlan(tuple(regions), offsets, end, capacity)
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
