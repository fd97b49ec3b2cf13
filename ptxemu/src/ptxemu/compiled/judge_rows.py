"""The rows that states and events are for the check's machine code (`judge_code`).

A state's row says where in the pool the numbers of its events are: those that wrote last, then
those that have read since.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

from ptxemu.compiled.loops import Ints, Value, Variable, when

ROW_FIELDS = 8
"""Numbers of 32 bits in a row."""
MOST_STATES = 512
"""That an access may find."""
MOST_WRITES, MOST_READS = 8, 32
"""Events of a state: atomics, and reads."""


class OfState(IntEnum):
    """The fields of a state's row."""

    AT = 0
    """Offset of its events in the pool."""
    WRITES = 1
    """Number of last writes; or `BY_PYTHON`, `UNTOUCHED`."""
    READS = 2
    NEXT_EVENT = 3
    """The event that was last applied to it, -1 if there was none; and what followed."""
    NEXT_STATE = 4
    MARK = 5
    """The last access in which it was found."""
    NEW = 6
    """The state that follows in the access that is judged."""


BY_PYTHON, UNTOUCHED = -1, -2
"""Values instead of the number of writes: only Python judges; nobody has written or read."""


class OfEvent(IntEnum):
    """The fields of an event's row."""

    AGENT = 0
    HOME = 1
    SLOT = 2
    CLOCK = 3
    WHAT = 4
    """See `What`."""
    WRITE_STATE = 5
    """The state of bytes that it was the last to write and nobody has read; -1 if there is none."""
    WARP = 6
    """The warp that it is of, or that issued it."""
    COLUMNS = 7
    """First column in tensor memory and the one after the last, as one number."""


class What(IntFlag):
    """Flags of an event; numbers of its kind and its proxy from the bits KIND and PROXY on."""

    WARP = 1
    MBARRIER = 2
    STRONG = 4
    DEVICE = 8
    """Strong, and its scope reaches all of the device."""
    ADDS_FLOATS = 16
    TMEM_COPY = 32
    """A tcgen05.ld or tcgen05.st."""


KIND, PROXY = 8, 10
"""Lowest bits of two each."""


class Flag(IntFlag):
    """Flags for the judgement of an access."""

    ROWS = 1
    """Pieces are rows of one distance, not starts."""
    OF_ONE_PAGE = 2
    """Pieces that are not in the page are left out."""
    TMEM = 4
    KNOWS_OTHERS = 8
    """The agent knows something of other clusters, which Python has to look up."""
    UNFENCED = 16
    """It has learnt something since its last tcgen05.fence::after_thread_sync."""
    TOLD = 32
    """Additions in no order have been reported."""


class Work(IntEnum):
    """The words of what all calls work with; the first are addresses."""

    EVENTS = 0
    STATES = 1
    POOL = 2
    FOUND = 3
    """Room for MOST_STATES numbers."""
    UNORDERED = 4
    """Room for MOST_STATES * MOST_WRITES numbers of events."""
    ACCESSES = 5
    """Number of accesses so far."""
    NUM_STATES = 6
    STATES_END = 7
    """States that there is room for."""
    POOL_USED = 8
    POOL_END = 9
    NUM_UNORDERED = 10
    """Additions of floats that are in no order with the access."""


class Verdict(IntEnum):
    """Result of a call."""

    DONE = 0
    OUTSIDE = 1
    """Some granules are not in the page."""
    BY_PYTHON = 2
    NO_ROOM = 3
    """No room is left for new states."""
    UNORDERED = 4
    """Nothing was done, because there are additions to report."""


class Tables(NamedTuple):
    """Addresses of `Work`, loaded once."""

    events: Any
    states: Any
    pool: Any
    found: Any
    unordered: Any

    @classmethod
    def load(cls, work: Value) -> Tables:
        """Load the addresses from the words of `Work`."""
        return cls(*(Ints(work.b, work[Work[name.upper()]].ir) for name in cls._fields))

    def state(self, number: Value) -> Ints:
        """The row of a state."""
        return _row(self.states, number)

    def event(self, number: Value) -> Ints:
        """The row of an event."""
        return _row(self.events, number)


def _row(table: Value, number: Value) -> Ints:
    return Ints(number.b, (table + number * (4 * ROW_FIELDS)).ir)


class Made:
    """States that are new. They count when the access is over: Python may have to judge it yet."""

    def __init__(self, tables: Tables, work: Value, own: Value) -> None:
        self._tables = tables
        self.count, self.used = Variable(work[Work.NUM_STATES]), Variable(work[Work.POOL_USED])
        self.own = Variable(own)

    def state(self, first: Value, writes: Any, reads: Any) -> Any:
        """The number of a new state, whose events are in the pool from `first` on."""
        number = self.count.value
        row = self._tables.state(number)
        row[OfState.AT], row[OfState.WRITES], row[OfState.READS] = first, writes, reads
        row[OfState.NEXT_EVENT], row[OfState.MARK] = -1, 0
        self.count.value = number + 1
        self.used.value = first + writes + reads
        return number

    def own_write(self, event: Value) -> Any:
        """The state of bytes that the event was the last to write, and nobody has read."""
        with when(self.own.value < 0):
            first = self.used.value
            self._tables.pool[first] = event
            self.own.value = self.state(first, 1, 0)
        return self.own.value


def has(word: Value, flag: What | Flag) -> Any:
    """Whether a word has a flag."""
    return (word & flag) != 0
