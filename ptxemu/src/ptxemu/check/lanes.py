"""Lanes of a warp that have not acquired what others of them have: a missing bar.warp.sync.

The check takes a warp as one agent, with one exception. An acquire, or a wait for an mbarrier,
orders what follows in its own threads only. Behind one that some lanes execute, the others know
what the warp knew before it, until the warp's lanes are synchronised. So as to report nothing that
is sound, anything else by which a warp learns ends that, too, and so does a shuffle or a vote,
though the ISA says of bar.warp.sync only that it orders memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ptxemu.check.lane_notes import EVERY, lanes_of
from ptxemu.check.state import Event, WarpActor
from ptxemu.events import Access, AccessKind, Agent, Proxy


def acquires(warp: WarpActor, agent: Agent) -> None:
    """Some or all lanes are about to acquire: note what the others know."""
    active, alive = lanes_of(agent)
    before = warp.know
    if warp.lagging is not None:
        earlier, before = warp.lagging
        active |= earlier
    elif alive & ~active:
        before = before.copy()
    warp.lagging = (active, before) if alive & ~active else None


def divided(warp: WarpActor, access: Access) -> tuple[Access | None, Access | None]:
    """The parts of an access by the lanes that know all that the warp knows, and by the others."""
    active, _ = lanes_of(access.agent)
    if warp.lagging is None or not active & ~warp.lagging[0]:
        return access, None
    order = [lane for lane in range(active.bit_length()) if active >> lane & 1]
    if len(order) != len(access.starts):
        return access, None
    knows = np.array([bool(warp.lagging[0] >> lane & 1) for lane in order])
    if not knows.any():
        return None, access
    return (
        replace(access, starts=access.starts[knows]),
        replace(access, starts=access.starts[~knows]),
    )


# Writes of some lanes of a warp that another lane's release does not speak for.
#
# The rest of the check takes a warp as one agent with one clock. A release of some lanes hands on
# what these know: their own writes, and those of lanes that they have met since. The other lanes'
# writes get a later clock, so that whoever acquires the release does not know them. An event of
# several lanes that only some of them release stays as it is: who knows a part of it knows all.

_MOST = 64
"""Writes of a warp that are remembered."""


@dataclass(slots=True)
class _Written:
    """A write, and the lanes that may speak for it."""

    event: Event
    lanes: int


class LaneReleases:
    """Writes of single lanes since the lanes of their warp have met."""

    def __init__(self) -> None:
        self._written: dict[WarpActor, list[_Written]] = {}

    def wrote(self, warp: WarpActor, access: Access, event: Event) -> None:
        """A warp has stored; note it if only some of its lanes have."""
        if access.kind is not AccessKind.WRITE or access.proxy is not Proxy.GENERIC or event.reach:
            return
        lanes = EVERY
        if len(access.starts) < 32 and access.instruction.modifiers[0] == "st":
            lanes, alive = lanes_of(access.agent)
            lanes = lanes if alive & ~lanes else EVERY
        event.lanes |= lanes
        if lanes != EVERY:
            written = self._written.setdefault(warp, [])
            written.append(_Written(event, lanes))
            del written[:-_MOST]

    def met(self, warp: WarpActor, agent: Agent, *, acquires: bool = False) -> None:
        """Lanes that execute together have met, or acquire what any lane has released."""
        written = self._written.get(warp)
        if not written:
            return
        lanes, alive = lanes_of(agent)
        if not alive & ~lanes:
            written.clear()
        for one in written:
            if acquires or one.lanes & lanes:
                one.lanes |= lanes

    def withheld(self, warp: WarpActor, agent: Agent) -> list[Event]:
        """Some or all lanes release: the writes that they do not speak for."""
        written = self._written.get(warp)
        if not written:
            return []
        lanes, _ = lanes_of(agent)
        written[:] = [one for one in written if not one.lanes & lanes]
        return [one.event for one in written if not one.event.lanes & lanes]
