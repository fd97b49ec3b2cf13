"""Shared memory as a list of regions: their offsets, and an error that shows the whole table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashdsa.plan.lifetimes import BudgetError, LiveRange, extents_of, refuse_conflicts


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
