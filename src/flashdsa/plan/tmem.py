"""Tensor memory as a list of column ranges that share columns if never live together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashdsa.hw import TMEM_LEAST_ALLOCATION
from flashdsa.plan.smem import BudgetError, LiveRange, extents_of, refuse_conflicts


@dataclass(frozen=True)
class TmemRegion:
    """Columns of 128 lanes.

    Attributes:
        column: the first one. columns: how many. holds: its contents, for people.
        live: the steps of the kernel in which it holds something; none: always.
    """

    name: str
    column: int
    columns: int
    holds: str
    live: tuple[LiveRange, ...] = ()


@dataclass(frozen=True)
class TmemPlan:
    """Regions of one allocation."""

    regions: tuple[TmemRegion, ...]
    allocated: int
    capacity: int

    def column(self, name: str) -> int:
        return self.region(name).column

    def region(self, name: str) -> TmemRegion:
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(f"no region {name!r} in this plan")


def plan_tmem(regions: Sequence[TmemRegion], capacity: int) -> TmemPlan:
    """Check the regions.

    Raises:
        BudgetError: one ends after `capacity`, or two share columns while both are live.
    """
    for region in regions:
        if region.column + region.columns > capacity:
            raise BudgetError(
                f"tensor memory: {region.name} [{region.column}, "
                f"{region.column + region.columns}) ends behind the {capacity} columns"
            )
    refuse_conflicts(
        "tensor memory",
        [
            extent
            for r in regions
            for extent in extents_of(r.name, r.column, r.column + r.columns, 1, r.live)
        ],
    )
    used = max(region.column + region.columns for region in regions)
    allocated = max(TMEM_LEAST_ALLOCATION, 1 << (used - 1).bit_length())
    return TmemPlan(tuple(regions), allocated, capacity)
