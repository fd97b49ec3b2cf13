"""Notes on what the lanes of a warp have done since they last met."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from numpy.typing import NDArray

from ptxemu.events import Agent, Space
from ptxemu.syntax.ast import Instruction

if TYPE_CHECKING:
    import numpy as np

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
