"""Lanes of a warp that have not acquired what others of them have: a missing bar.warp.sync.

The check takes a warp as one agent, with one exception. An acquire, or a wait for an mbarrier,
orders what follows in its own threads only. Behind one that some lanes execute, the others know
what the warp knew before it, until the warp's lanes are synchronised. So as to report nothing that
is sound, anything else by which a warp learns ends that, too, and so does a shuffle or a vote,
though the ISA says of bar.warp.sync only that it orders memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu.check.state import Event, WarpActor
from ptxemu.events import Access, AccessKind, Agent, Proxy, Space
from ptxemu.syntax.ast import Instruction

if TYPE_CHECKING:
    import numpy as np


# Notes on what the lanes of a warp have done since they last met.

EVERY = (1 << 32) - 1
"""All lanes, as bits."""
ALL_LANES = bytes(range(32))
ALL_BYTES = 8 * len(ALL_LANES)
"""Bytes of the addresses of all lanes."""
Ids: TypeAlias = tuple[Space, int | None]
"""A memory: space and owner."""


def lanes_of(agent: Agent) -> tuple[int, int]:
    """The lanes that execute the warp's instruction, and those that have not exited, as bits."""
    lanes_now = getattr(agent, "lanes_now", None)
    return (EVERY, EVERY) if lanes_now is None else lanes_now()


class Form(NamedTuple):
    """An instruction's kind of access."""

    instruction: Instruction
    size: int
    is_write: bool
    is_strong: bool
    is_noted: bool
    """It is one of single lanes."""
    is_volatile: bool
    """A volatile write, or a volatile read that looks at no flag: a plain one to CUDA C++."""


class Noted(NamedTuple):
    """An access of some lanes of a warp."""

    position: int
    """Its number in the stretch."""
    form: Form
    starts: bytes
    lanes: bytes
    """The lane of each piece."""
    silent: NDArray[np.bool_] | bool
    """Which pieces are writes of what was there already."""
    exchanges: int
    """Number of exchanges of all lanes before it in the stretch."""


class NotedLoads(NamedTuple):
    """Loads [begin, end) of some that stand in a row, the first of which has position `first`."""

    first: int
    forms: list[Form]
    starts: bytes
    """Addresses of all loads, those before `begin` included."""
    begin: int
    end: int
    exchanges: int

    def each(self) -> Iterator[Noted]:
        """The loads one by one."""
        for load in range(self.begin, self.end):
            starts = self.starts[ALL_BYTES * load : ALL_BYTES * (load + 1)]
            place = self.first + load
            yield Noted(place, self.forms[load], starts, ALL_LANES, False, self.exchanges)


noted, noted_loads = Noted._make, NotedLoads._make
"""Quicker than the classes."""


class Notes:
    """A warp's accesses to one memory."""

    __slots__ = ("count", "entries")

    def __init__(self) -> None:
        self.entries: list[Noted | NotedLoads] = []
        self.count = 0

    def noted(self) -> list[Noted]:
        """The accesses one by one."""
        return [
            noted
            for entry in self.entries
            for noted in (entry.each() if isinstance(entry, NotedLoads) else (entry,))
        ]


class Meeting(NamedTuple):
    """Some lanes of a warp have waited for each other, or have acquired what any lane released.

    With a token they arrive at a barrier, or (`acquires`) have waited for all that arrived there.
    """

    position: int
    lanes: int
    acquires: bool = False
    token: Hashable = None
    exchanges: bool = False
    """They exchanged values, which orders no memory."""


class Stretch:
    """A warp's accesses since its lanes last met."""

    __slots__ = ("_notes", "exchanges", "has_released", "meetings", "position", "written")

    def __init__(self) -> None:
        self._notes: dict[Ids, Notes] = {}
        self.meetings: list[Meeting] = []
        self.written: set[Ids] = set()
        """Memories with a write among the accesses."""
        self.position = 0
        self.exchanges = 0
        self.has_released = False
        """Some lane has done what another one can acquire."""

    def notes(self, ids: Ids) -> Notes:
        """The accesses to a memory."""
        notes = self._notes.get(ids)
        if notes is None:
            notes = self._notes[ids] = Notes()
        return notes

    def clear(self) -> None:
        """All lanes have met."""
        self._notes.clear()
        self.written.clear()
        self.meetings.clear()
        self.position, self.exchanges, self.has_released = 0, 0, False


def is_ordered(meetings: list[Meeting], first: int, a: int, second: int, b: int) -> bool:
    """Whether meetings of some lanes order lane a's access at `first` before lane b's at `second`.

    The lanes that have met know what any of them knew, and what they did until then.
    """
    knows = 1 << a
    left = set[Hashable]()
    for meeting in meetings:
        if not first <= meeting.position < second:
            continue
        is_known = meeting.lanes & knows
        if meeting.token is not None and not meeting.acquires:
            left |= {meeting.token} if is_known else set()
        elif is_known or (meeting.token in left if meeting.token is not None else meeting.acquires):
            knows |= meeting.lanes
        if knows >> b & 1:
            return True
    return False


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
