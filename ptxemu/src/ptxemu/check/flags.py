"""Flags in memory: release and acquire through a location (PTX ISA, "Release and Acquire
Patterns", "Causality Order").

A store or atomic with release semantics, or a relaxed one after a fence, leaves knowledge at its
location; a load or atomic with acquire semantics, or a relaxed one before a fence, takes it. The
emulator executes in one order, so a load reads what was stored there last: a store replaces what
was left there, an atomic continues it (a release sequence).

fence.sc (and membar) does more: of two of them one comes first for all, and if something after
one was seen before the other, the former comes first. What a thread knew at a fence.sc
therefore travels as SC_RELEASED through barriers to whoever signals, with any strong store, and as
SC_SEEN from whoever sees the signal through barriers to the next fence.sc, which acquires it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ptxemu.check.state import CLUSTER, CTA, GPU
from ptxemu.check.vector_clock import GENERIC, SC_RELEASED, SC_SEEN, Knowledge
from ptxemu.events import Access, AccessKind, Space

if TYPE_CHECKING:
    from ptxemu.check.state import WarpActor
    from ptxemu.events import Fence

_REACH = {"cta": CTA, "cluster": CLUSTER}
Location: TypeAlias = tuple[Space, int | None, int]
"""Space, owner and address."""


def reach_of(scope: str) -> int:
    """Return the reach of a scope; the device is the only one, so sys reaches as far as gpu."""
    return _REACH.get(scope, GPU)


def _domains(warp: WarpActor) -> tuple[int, int, int]:
    """The CTA, the cluster and the device that scopes of the three levels reach from a warp."""
    return warp.cta, warp.home, 0


def _locations(access: Access) -> list[Location]:
    if len(access.starts) == 1:
        return [(access.space, access.owner, int(access.starts[0]))]
    found: list[int] = np.unique(access.starts).tolist()
    return [(access.space, access.owner, address) for address in found]


class Flags:
    """Knowledge that was released into locations.

    A release of a scope reaches an acquire only if each is in the other's scope. It is filed under
    the scope's level and all wider domains that it is in; an acquire looks at its level and below.
    """

    def __init__(self) -> None:
        self._released: dict[Location, dict[tuple[int, int], Knowledge]] = {}
        """Released knowledge by location, and by the scope's level and the CTA or cluster of that
        level."""
        self._seen: dict[Location, Knowledge] = {}
        """Knowledge that readers of a location get as SC_SEEN, by location."""
        self._has_sc = False
        """There was a fence.sc."""

    def accessed(self, warp: WarpActor, access: Access) -> None:
        """A strong access of a warp: acquire first, then release."""
        if access.kind is not AccessKind.WRITE and (self._released or self._seen):
            self._acquire(warp, access)
        if access.kind is not AccessKind.READ:
            self._release(warp, access)

    def fenced(self, warp: WarpActor, fence: Fence) -> None:
        """Acquire what relaxed loads saw; relaxed stores after the fence release."""
        if fence.order != "release" and warp.to_acquire is not None:
            warp.know.unite(warp.to_acquire)
            warp.to_acquire = None
            warp.unfenced_tcgen05 = True
        is_sc = fence.order == "sc" and reach_of(fence.scope) == GPU
        if is_sc:
            self._has_sc = warp.has_fenced_sc = True
            for part in warp.know.parts.values():
                part.done |= part.sc_seen
                part.sc_released |= part.done
                known, seen = part.clocks[GENERIC], part.clocks[SC_SEEN]
                np.maximum(known, seen, out=known)
                np.maximum(part.clocks[SC_RELEASED], known, out=part.clocks[SC_RELEASED])
        if fence.order != "acquire":
            warp.released_by_fence = (warp.know.copy(), fence.scope)
        warp.tick()

    def _acquire(self, warp: WarpActor, access: Access) -> None:
        level = reach_of(access.scope)
        domains = _domains(warp)
        acquires = access.order in ("acquire", "acq_rel", "seq_cst")
        for location in _locations(access):
            seen = self._seen.get(location)
            if seen is not None:
                for home, part in seen.parts.items():
                    mine = warp.know.part(home, part.clocks.shape[1])
                    np.maximum(mine.clocks[SC_SEEN], part.clocks[SC_SEEN], out=mine.clocks[SC_SEEN])
                    mine.sc_seen |= part.sc_seen
            released = self._released.get(location)
            if not released:
                continue
            for wide in range(CTA, level + 1):
                found = released.get((wide, domains[wide - 1]))
                if found is None:
                    continue
                if acquires:
                    warp.know.unite(found)
                    warp.unfenced_tcgen05 = True
                elif warp.to_acquire is None:
                    warp.to_acquire = found.copy()
                else:
                    warp.to_acquire.unite(found)

    def _release(self, warp: WarpActor, access: Access) -> None:
        if access.kind is AccessKind.WRITE:
            for location in _locations(access):
                self._released.pop(location, None)
                self._seen.pop(location, None)
        if self._has_sc:
            self._show(warp, access)
        releases = access.order in ("release", "acq_rel", "seq_cst")
        level = reach_of(access.scope)
        if releases:
            knowledge = warp.know
        elif warp.released_by_fence is not None:
            knowledge, fence_scope = warp.released_by_fence
            level = min(level, reach_of(fence_scope))
        else:
            return
        domains = _domains(warp)
        for location in _locations(access):
            released = self._released.setdefault(location, {})
            # A wider scope serves narrower acquirers in the same domain too.
            for wide in range(CTA, level + 1):
                found = released.get((wide, domains[wide - 1]))
                if found is None:
                    released[wide, domains[wide - 1]] = knowledge.copy()
                else:
                    found.unite(knowledge)
        if releases:
            warp.tick()

    def _show(self, warp: WarpActor, access: Access) -> None:
        """Whoever reads the location sees what came before fence.sc's that come before this."""
        for home, part in warp.know.parts.items():
            if not part.sc_released and not part.clocks[SC_RELEASED].any():
                continue
            for location in _locations(access):
                seen = self._seen.setdefault(location, Knowledge())
                shown = seen.part(home, part.clocks.shape[1])
                np.maximum(
                    shown.clocks[SC_SEEN], part.clocks[SC_RELEASED], out=shown.clocks[SC_SEEN]
                )
                shown.sc_seen |= part.sc_released
