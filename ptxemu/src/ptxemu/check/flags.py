"""Flags in memory: release and acquire through a location (PTX ISA, "Release and Acquire
Patterns", "Observation Order", "Causality Order").

Release pattern: a release operation on a location; a release operation on it and then a strong
write of it; a release fence and then a strong write. Acquire pattern: an acquire operation; a
strong read and then an acquire operation on the location; a strong read and then an acquire fence.
A `red` begins no acquire pattern. A read observes the write that it reads if the two are morally
strong, and through atomics what those observed. Two patterns synchronise if the read of the one
observes the write of the other, and the first operation of the release pattern and the last of the
acquire pattern are in each other's scope.

The emulator executes in one order, so a read reads what was stored last: a store replaces what was
left at its location, an atomic continues it, if it observes what it reads. What is left is filed by
level and by the *writer's* domain of that level: an entry of a level is there only if the scope of
the release pattern's first operation reaches that far, and whoever acquires with a scope takes the
entries of its own domains up to the scope's level.

fence.sc does more: if anything after one was seen before another, by reads, by the order of writes
or by reads of older values, the former comes first. The pasts of fence.sc's (`check.vector_clock`)
therefore travel with knowledge to whoever signals, with any strong access, and from whoever comes
after that access, to the next fence.sc, which acquires them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from ptxemu.check.state import CLUSTER, CTA, GPU, WarpActor, are_in_reach
from ptxemu.check.vector_clock import (
    GENERIC,
    NO_PASTS,
    SEEN,
    Domain,
    Knowledge,
    Past,
    Pasts,
    Snapshot,
    Snapshots,
    later,
    united,
)
from ptxemu.events import Access, AccessKind, Fence, Space

_REACH = {"cta": CTA, "cluster": CLUSTER}
LEVELS = (CTA, CLUSTER, GPU)
Location: TypeAlias = tuple[Space, int | None, int]
"""Space, owner and address."""


def reach_of(scope: str) -> int:
    """Return the reach of a scope; the device is the only one, so sys reaches as far as gpu."""
    return _REACH.get(scope, GPU)


def _domains(warp: WarpActor) -> tuple[Domain, ...]:
    """The CTA, the cluster and the device that scopes of the three levels reach from a warp."""
    return (CTA, warp.cta), (CLUSTER, warp.home), (GPU, 0)


def _locations(access: Access) -> list[Location]:
    if len(access.starts) == 1:
        return [(access.space, access.owner, int(access.starts[0]))]
    found: list[int] = np.unique(access.starts).tolist()
    return [(access.space, access.owner, address) for address in found]


def _past(know: Knowledge) -> Past:
    """All that an agent knows now to have happened."""
    parts = know.parts.items()
    clocks = {home: part.clocks[GENERIC].copy() for home, part in parts}
    return Past(clocks, {home: part.done for home, part in parts})


def _learn(know: Knowledge, before: Past) -> None:
    """Learn all of a past."""
    for home, clocks in before.clocks.items():
        part = know.part(home, len(clocks))
        known = part.clocks[GENERIC]
        np.maximum(known, clocks, out=known)
        part.done |= before.done[home]


class _Write(NamedTuple):
    """The last strong write of a location."""

    warp: WarpActor
    reach: int
    size: int

    def is_observed_by(self, other: _Write) -> bool:
        """Whether an access that reads it observes it."""
        if self.warp is other.warp:
            return True
        if self.size != other.size:
            return False
        return are_in_reach(min(self.reach, other.reach), self.warp, other.warp)


class _Place:
    """A location that something was released into."""

    __slots__ = ("last", "own", "released")

    def __init__(self, last: _Write) -> None:
        self.last = last
        self.released: dict[Domain, Knowledge] = {}
        """Knowledge that the last write, and what it continues, released."""
        self.own: dict[WarpActor, Snapshots] = {}
        """Each warp's knowledge at its latest release operation on the location."""

    def leave(self, warp: WarpActor) -> None:
        """A strong write of a warp leaves what it releases."""
        own = self.own.get(warp)
        for level, domain in zip(LEVELS, _domains(warp), strict=True):
            fenced = warp.fenced[level]
            left = fenced if own is None else later(fenced, own[level])
            if left is None:
                continue
            before = self.released.get(domain)
            if before is None:
                self.released[domain] = left.know
            elif before is not left.know:
                self.released[domain] = whole = before.copy()
                whole.unite(left.know)


class Flags:
    """Knowledge that was released into locations."""

    def __init__(self) -> None:
        self._places: dict[Location, _Place] = {}
        self._written: dict[Location, Pasts] = {}
        self._read: dict[Location, Pasts] = {}
        """Pasts that strong writes and reads of a location came after."""
        self._has_sc = False
        """There was a fence.sc."""

    def accessed(self, warp: WarpActor, access: Access) -> None:
        """A strong access of a warp: acquire first, then release."""
        releases = access.order in ("release", "acq_rel", "seq_cst")
        leaves = access.kind is not AccessKind.READ and (releases or warp.fenced[CTA] is not None)
        if not (leaves or self._places or self._has_sc):
            return
        locations = _locations(access)
        if self._has_sc:
            self._follow(warp, access, locations)
        if leaves or not self._places.keys().isdisjoint(locations):
            mine = _Write(warp, reach_of(access.scope), access.size)
            if access.kind is not AccessKind.WRITE:
                self._acquire(mine, access, locations)
            if access.kind is not AccessKind.READ:
                self._release(mine, access, locations, releases=releases)
        if self._has_sc and warp.know.gave:
            self._lead(warp, access, locations)

    def fenced(self, warp: WarpActor, fence: Fence) -> None:
        """Acquire what strong reads saw; take the place among fence.sc's; strong writes after the
        fence release."""
        reach = reach_of(fence.scope)
        if fence.order != "release":
            for seen in warp.pending.take(reach):
                warp.know.unite(seen)
                warp.unfenced_tcgen05 = True
        if fence.order == "sc":
            self._has_sc = True
            warp.has_fenced_sc |= reach == GPU
            self._order(warp, _domains(warp)[:reach])
        if fence.order != "acquire":
            now = Snapshot(warp.clock, warp.know.copy())
            warp.fenced[CTA : reach + 1] = [now] * reach
        warp.tick()

    def _order(self, warp: WarpActor, domains: tuple[Domain, ...]) -> None:
        """A fence.sc comes after those that something forces to come before it."""
        know = warp.know
        for domain in domains:
            before = know.seen_pasts.get(domain)
            if before is not None:
                _learn(know, before)
                known = {d: one for d, one in know.seen_pasts.items() if before.includes(one)}
                know.gave = united(know.gave, known)
        now = _past(know)
        know.gave = united(know.gave, dict.fromkeys(domains, now))

    def _follow(self, warp: WarpActor, access: Access, locations: list[Location]) -> None:
        """Come after the strong accesses of the locations that this one comes after."""
        know, writes = warp.know, access.kind is not AccessKind.READ
        for location in locations:
            know.seen_pasts = united(know.seen_pasts, self._written.get(location, NO_PASTS))
            if writes:
                know.seen_pasts = united(know.seen_pasts, self._read.get(location, NO_PASTS))

    def _lead(self, warp: WarpActor, access: Access, locations: list[Location]) -> None:
        """Let those that come after this access know of the fence.sc's before it."""
        filed = self._read if access.kind is AccessKind.READ else self._written
        for location in locations:
            filed[location] = united(filed.get(location, NO_PASTS), warp.know.gave)

    def _acquire(self, mine: _Write, access: Access, locations: list[Location]) -> None:
        warp, pending = mine.warp, mine.warp.pending
        acquires = access.order in ("acquire", "acq_rel", "seq_cst")
        is_red = access.instruction.modifiers[0] == "red"
        taken: list[Knowledge] = []
        for location in locations:
            place = self._places.get(location)
            if place is not None and place.last.is_observed_by(mine):
                for domain in _domains(warp):
                    found = place.released.get(domain)
                    if found is None:
                        continue
                    if acquires and domain[0] <= mine.reach:
                        taken.append(found)
                    elif not is_red:
                        pending.see(domain[0], location, found)
                        if access.kind is AccessKind.ATOMIC:
                            warp.know.unite_row(found, SEEN)
            if acquires and pending:
                taken += pending.at(location, mine.reach)
        for one in {id(one): one for one in taken}.values():
            warp.know.unite(one)
            warp.unfenced_tcgen05 = True

    def _release(
        self, mine: _Write, access: Access, locations: list[Location], *, releases: bool
    ) -> None:
        warp = mine.warp
        is_atomic = access.kind is AccessKind.ATOMIC
        leaves = releases or warp.fenced[CTA] is not None
        now = Snapshot(warp.clock, warp.know.copy()) if releases else None
        for location in locations:
            place = self._places.get(location)
            if place is None:
                if not leaves:
                    continue
                place = self._places[location] = _Place(mine)
            elif not (is_atomic and place.last.is_observed_by(mine)):
                place.released.clear()
            if now is not None:
                own = place.own.setdefault(warp, [None] * (GPU + 1))
                own[CTA : mine.reach + 1] = [now] * mine.reach
            place.leave(warp)
            place.last = mine
        if releases:
            warp.tick()
