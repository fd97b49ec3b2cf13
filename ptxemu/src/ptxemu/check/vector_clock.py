"""Knowledge of agents about the others' past: vector clocks of warps, sets of finished operations.

Knowledge is kept by cluster, because almost all of it concerns the agent's own: the clocks of a
cluster's warps are a small matrix, its asynchronous operations are bits of Python integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

# Pasts: what had happened before a fence.sc, to be told to other fence.sc's.
#
# Of two fence.sc's that are in each other's scope one comes first for all (PTX ISA, "Fence-SC
# Order"). If anything forces which, the later one acquires the past of the former. Pasts are filed
# by the domains that a fence's scope reaches; neither they nor the files change once they are made.

Domain: TypeAlias = tuple[int, int]
"""Level of a scope, and the CTA or cluster of that level (0 for the device)."""


class Past:
    """Clocks of warps, and operations that are done, by cluster."""

    __slots__ = ("clocks", "done")

    def __init__(self, clocks: dict[int, NDArray[np.int32]], done: dict[int, int]) -> None:
        self.clocks = clocks
        self.done = done

    def includes(self, other: Past) -> bool:
        """Whether all of another past is in this one."""
        if self is other:
            return True
        for home, theirs in other.clocks.items():
            mine = self.clocks.get(home)
            if mine is None or (mine < theirs).any():
                return False
            if other.done[home] & ~self.done[home]:
                return False
        return True

    def united(self, other: Past) -> Past:
        """Both pasts."""
        clocks, done = dict(self.clocks), dict(self.done)
        for home, theirs in other.clocks.items():
            mine = clocks.get(home)
            clocks[home] = theirs if mine is None else np.maximum(mine, theirs)
            done[home] = done.get(home, 0) | other.done[home]
        return Past(clocks, done)


Pasts: TypeAlias = "Mapping[Domain, Past]"
"""Pasts by the domains that the fences' scopes reach."""
NO_PASTS: Pasts = {}


def united(one: Pasts, other: Pasts) -> Pasts:
    """Pasts that are in either; one of the two where that has all."""
    if not other or one is other:
        return one
    if not one:
        return other
    found: dict[Domain, Past] | None = None
    for domain, past in other.items():
        mine = one.get(domain)
        if mine is not None and mine.includes(past):
            continue
        if found is None:
            found = dict(one)
        found[domain] = past if mine is None or past.includes(mine) else mine.united(past)
    return one if found is None else found


GENERIC = 0
"""Row of a Part's clocks: what happened before, for the generic proxy."""
ASYNC_SHARED = 1
"""Generic accesses to shared memory that are ordered for the async proxy too."""
ASYNC_GLOBAL = 2
"""Generic accesses to global memory that are ordered for the async proxy too."""
MBARRIER_INIT = 3
"""mbarrier initialisations that a fence.mbarrier_init made known to cluster and async proxy."""
TENSORMAP = 4
"""Generic accesses that are ordered for the tensormap proxy too."""
TENSORMAP_RELEASED = 5
"""Generic accesses that a fence released to the tensormap proxy; another fence acquires them."""
TCGEN05 = 6
"""Issue of tcgen05 instructions, which tcgen05 fences order although the arrival or the wait
between them is relaxed (PTX ISA, "Canonical Synchronization Patterns" of tcgen05)."""
ARRIVED = 7
"""Relaxed arrivals that were left at a token: they order nothing, but have happened."""
RELAXED = 8
"""Generic accesses that only a relaxed barrier of the cluster separates: the ISA orders nothing."""
SEEN = 9
"""Events that came before in time, even by relaxed arrivals and waits, which order no memory."""
OUT_OF_SCOPE = 10
"""Generic accesses that only a wait of a scope stands behind which does not reach their agent."""
ROWS = 11


class Part:
    """Knowledge about the agents of one cluster.

    A warp's event at clock c is known when clocks[row, slot of the warp] >= c; an operation has
    one event, known when its bit is set.
    """

    __slots__ = (
        *("clocks", "done", "fenced", "handed_on", "reads"),
        *("seen", "tcgen05", "touched", "used"),
    )

    def __init__(self, width: int) -> None:
        self.clocks: NDArray[np.int32] = np.zeros((ROWS, width), dtype=np.int32)
        self.done = 0
        """Operations that are known to have completed."""
        self.reads = 0
        """Operations that are known to have read their sources (besides those that are done)."""
        self.touched = 0
        """tcgen05.ld with whose registers something was computed, which is no order."""
        self.used = 0
        """Operations of `touched` whose registers were needed, which is no order for the ISA."""
        self.tcgen05 = 0
        """tcgen05 operations done before the last tcgen05.fence::before_thread_sync."""
        self.handed_on = 0
        """Those and what others let this agent know of theirs."""
        self.fenced = 0
        """Operations done whose generic-proxy writes are ordered for the async proxy too."""
        self.seen = 0
        """Operations besides those that are done, as the clocks of SEEN."""

    def copy(self) -> Part:
        """A copy that may change on its own."""
        new = Part.__new__(Part)
        new.clocks = self.clocks.copy()
        new.done, new.reads, new.fenced = self.done, self.reads, self.fenced
        new.touched, new.used = self.touched, self.used
        new.tcgen05, new.handed_on = self.tcgen05, self.handed_on
        new.seen = self.seen
        return new

    def unite(self, other: Part) -> None:
        """Learn all that `other` holds."""
        np.maximum(self.clocks, other.clocks, out=self.clocks)
        # A set of thousands of operations takes longer to unite than to be found the same or empty.
        if other.done is not self.done:
            self.done |= other.done
        if other.reads is not self.reads:
            self.reads |= other.reads
        if other.fenced is not self.fenced:
            self.fenced |= other.fenced
        if other.touched:
            self.touched |= other.touched
        if other.used:
            self.used |= other.used
        if other.handed_on is not self.handed_on:
            self.handed_on |= other.handed_on
        if other.seen is not self.seen:
            self.seen |= other.seen


class Knowledge:
    """Knowledge that an agent, or a token that agents meet at, has of every cluster."""

    __slots__ = ("gave", "parts", "seen_pasts")

    def __init__(self) -> None:
        self.parts: dict[int, Part] = {}
        self.gave: Pasts = NO_PASTS
        """Pasts of the fence.sc's that happened before (`check.flags`)."""
        self.seen_pasts: Pasts = NO_PASTS
        """Pasts of fence.sc's that come before the agent's next fence.sc."""

    def part(self, home: int, width: int) -> Part:
        """The part of cluster `home`, which has `width` warps."""
        part = self.parts.get(home)
        if part is None:
            part = self.parts[home] = Part(width)
        return part

    def includes(
        self, home: int, slot: int, is_warp: bool, clock: int, reads: bool = False
    ) -> bool:
        """Whether the past of an agent of cluster `home` is known.

        Args:
            slot, is_warp: the agent: a warp's column, or an operation's bit.
            clock: of the warp; `reads`: that the operation has read its sources will do.
        """
        part = self.parts.get(home)
        if part is None:
            return False
        if is_warp:
            return part.clocks.item(GENERIC, slot) >= clock
        bits = part.done | part.reads | part.touched if reads else part.done
        return bool(bits >> slot & 1)

    def has_seen(self, home: int, slot: int, clock: int) -> bool:
        """Whether an arrival of a warp at its `clock` was seen, be it a relaxed one."""
        part = self.parts.get(home)
        return part is not None and bool(part.clocks[[GENERIC, ARRIVED], slot].max() >= clock)

    def copy(self) -> Knowledge:
        """A copy that may change on its own."""
        new = Knowledge()
        new.parts = {home: part.copy() for home, part in self.parts.items()}
        new.gave, new.seen_pasts = self.gave, self.seen_pasts
        return new

    def unite(self, other: Knowledge) -> None:
        """Learn all that `other` holds."""
        for home, part in other.parts.items():
            mine = self.parts.get(home)
            if mine is None:
                self.parts[home] = part.copy()
            else:
                mine.unite(part)
        if other.gave:
            self.gave = united(self.gave, other.gave)
        if other.seen_pasts:
            self.seen_pasts = united(self.seen_pasts, other.seen_pasts)

    def unite_row(self, other: Knowledge, row: int, source: int | None = None) -> None:
        """Learn one row of clocks only, by default from the same row."""
        source = row if source is None else source
        for home, part in other.parts.items():
            mine = self.part(home, part.clocks.shape[1])
            np.maximum(mine.clocks[row], part.clocks[source], out=mine.clocks[row])


NOTHING = Knowledge()
"""Knowledge of an operation that is over; shared, so it must not learn."""


class Snapshot(NamedTuple):
    """Knowledge of a warp at a fence or at a release operation; later ones hold earlier ones."""

    clock: int
    know: Knowledge


Snapshots: TypeAlias = "list[Snapshot | None]"
"""Snapshots of a warp by the level of a scope; the first is not used."""


def later(one: Snapshot | None, other: Snapshot | None) -> Snapshot | None:
    """The one of a warp's two snapshots that holds the other."""
    if one is None or (other is not None and other.clock > one.clock):
        return other
    return one
