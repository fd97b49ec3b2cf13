"""The rows that states and events are for the check's machine code (`judge_code`).

A state's row says where in the pool the numbers of its events are: those that wrote last, then
those that have read since.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

from llvmlite import ir

from ptxemu.compiled.loops import I64, at, constant, local, word_at

ROW_FIELDS = 8
"""Numbers of 32 bits in a row."""
MOST_STATES = 512
"""That an access may find."""
MOST_WRITES, MOST_READS = 8, 32
"""Events of a state: atomics, and reads."""
I1, I32 = ir.IntType(1), ir.IntType(32)


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
    def load(cls, b: Any, work: Any) -> Tables:
        """Load the addresses from the words of `Work`."""
        return cls(*(word_at(b, work, Work[name.upper()]) for name in cls._fields))

    def state(self, b: Any, number: Any, which: OfState) -> Any:
        """A pointer to a field of a state."""
        index = b.add(b.mul(number, constant(ROW_FIELDS)), constant(which))
        return at(b, self.states, I32, index)

    def event(self, b: Any, number: Any) -> Any:
        """The address of an event's row."""
        return b.add(self.events, b.mul(number, constant(4 * ROW_FIELDS)))

    def pooled(self, b: Any, index: Any) -> Any:
        """The number of an event in the pool."""
        return wide(b, b.load(at(b, self.pool, I32, index)))

    def pool_one(self, b: Any, index: Any, event: Any) -> None:
        """Put an event's number into the pool."""
        b.store(b.trunc(event, I32), at(b, self.pool, I32, index))


class Made:
    """States that are new. They count when the access is over: Python may have to judge it yet."""

    def __init__(self, b: Any, tables: Tables, work: Any, own: Any) -> None:
        self._tables = tables
        self.count, self.used, self.own = (local(b, I64) for _ in range(3))
        b.store(word_at(b, work, Work.NUM_STATES), self.count)
        b.store(word_at(b, work, Work.POOL_USED), self.used)
        b.store(own, self.own)

    def state(self, b: Any, first: Any, writes: Any, reads: Any) -> Any:
        """The number of a new state, whose events are in the pool from `first` on."""
        number = b.load(self.count)
        fields = {
            OfState.AT: first,
            OfState.WRITES: writes,
            OfState.READS: reads,
            OfState.NEXT_EVENT: constant(-1),
            OfState.MARK: constant(0),
        }
        for which, value in fields.items():
            b.store(b.trunc(value, I32), self._tables.state(b, number, which))
        b.store(b.add(number, constant(1)), self.count)
        b.store(b.add(first, b.add(writes, reads)), self.used)
        return number

    def own_write(self, b: Any, event: Any) -> Any:
        """The state of bytes that the event was the last to write, and nobody has read."""
        with b.if_then(b.icmp_signed("<", b.load(self.own), constant(0))):
            first = b.load(self.used)
            self._tables.pool_one(b, first, event)
            b.store(self.state(b, first, constant(1), constant(0)), self.own)
        return b.load(self.own)


def wide(b: Any, number: Any) -> Any:
    """32 bits as a word."""
    return b.sext(number, I64)


def field(b: Any, row: Any, which: OfEvent) -> Any:
    """A pointer to a field of an event's row at an address."""
    return at(b, row, I32, which)


def has(b: Any, word: Any, flag: What | Flag) -> Any:
    """Whether a word has a flag."""
    return b.icmp_unsigned("!=", b.and_(word, constant(flag)), constant(0))
