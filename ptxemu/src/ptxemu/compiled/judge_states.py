"""The state that follows another one, in machine code: `check.known_order` and `check.races` for
what is known to be in order."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ptxemu.compiled.judge_rows import (
    KIND,
    MOST_READS,
    MOST_WRITES,
    PROXY,
    UNTOUCHED,
    Flag,
    Made,
    OfEvent,
    OfState,
    Tables,
    What,
    Work,
    has,
)
from ptxemu.compiled.loops import (
    I1,
    I32,
    I64,
    Ints,
    Value,
    Variable,
    constant,
    counted,
    require,
    when,
)

# Parts of Python's own objects that machine code reads: bits of an integer, data of an array.
#
# Both have fixed offsets in CPython and NumPy; `is_layout_known` tries whether they hold here.

_SIZE, _DIGITS = 16, 24
"""Offsets, in an integer, of its number of digits and of its 30-bit digits, the lowest first."""
_DATA, _STRIDES = 16, 40
"""Offsets, in an array, of the addresses of its data and of its strides."""
_DIGIT_BITS = 30
_SIZE_SHIFT = 3 if sys.version_info >= (3, 12) else 0
"""Lowest bits of the size that say something else."""


def bit_of(integer: Value, number: Value) -> Any:
    """A bit of an integer object that is not negative."""
    b = number.b
    digit, bit = (Value(b, divide(number.ir, constant(_DIGIT_BITS))) for divide in (b.udiv, b.urem))
    is_there = digit.is_below((integer + _SIZE)[0].shifted_right(_SIZE_SHIFT))
    # Every integer has a place for a first digit.
    place = (integer + _DIGITS).pointer(I32, is_there.choice(digit, 0))
    shifted = b.lshr(b.zext(b.load(place), I64), bit.ir)
    return Value(b, b.trunc(shifted, I1)) & is_there


def data_of(array: Value) -> Any:
    """The address of an array's data."""
    return (array + _DATA)[0]


def row_bytes_of(array: Value) -> Any:
    """Bytes between the rows of an array of two dimensions."""
    return (array + _STRIDES)[0][0]


@cache
def is_layout_known() -> bool:
    """Whether objects are laid out as machine code takes them to be."""
    if sys.implementation.name != "cpython" or sys.int_info.bits_per_digit != _DIGIT_BITS:
        return False
    word, half = ctypes.c_int64.from_address, ctypes.c_uint32.from_address
    for number in (0, 1, 1 << 29, (1 << 30) + 5, (7 << 900) + (3 << 31) + 1):
        place, digits = id(number), -(-number.bit_length() // _DIGIT_BITS)
        if word(place + _SIZE).value >> _SIZE_SHIFT != digits:
            return False
        found = [half(place + _DIGITS + 4 * k).value for k in range(digits)]
        if sum(digit << _DIGIT_BITS * k for k, digit in enumerate(found)) != number:
            return False
    array = np.zeros((3, 5), dtype=np.int32)
    if word(id(array) + _DATA).value != array.ctypes.data:
        return False
    return word(word(id(array) + _STRIDES).value).value == array.strides[0]


# Order of an access after earlier events, in machine code: `known_order` and `proxies`.

READ, WRITE, ATOMIC = range(3)
"""`events.AccessKind.number`."""
GENERIC = 0
"""`events.Proxy.number`, and the first row of clocks."""
_TWO_BITS = 3


class First(NamedTuple):
    """An event that came before."""

    agent: Any
    home: Any
    slot: Any
    clock: Any
    what: Any
    warp: Any

    @classmethod
    def load(cls, row: Ints) -> First:
        """Load the event from its row."""
        return cls(*(row[OfEvent[name.upper()]] for name in cls._fields))

    @property
    def kind(self) -> Any:
        """Its AccessKind's number."""
        return self.what.shifted_right(KIND) & _TWO_BITS

    @property
    def proxy(self) -> Any:
        """Its Proxy's number."""
        return self.what.shifted_right(PROXY) & _TWO_BITS


class Second:
    """The event that is judged, and what its agent knows."""

    def __init__(self, row: Ints, given: dict[str, Any], by_python: Any) -> None:
        self.row = First.load(row)
        self.kind, self.proxy = self.row.kind, self.row.proxy
        self._given, self._by_python = given, by_python
        flags = given["flags"]
        self.is_in_tmem = has(flags, Flag.TMEM)
        self._is_unfenced = has(flags, Flag.UNFENCED)
        self._knows_others = has(flags, Flag.KNOWS_OTHERS)
        self._clocks = data_of(given["clocks"])
        self._fenced_clocks = self._clocks + row_bytes_of(given["clocks"]) * given["fence_row"]
        self._is_generic = self.proxy == GENERIC

    def is_agent_of(self, first: First) -> Any:
        """Whether an agent did both."""
        return first.agent == self.row.agent

    def is_in_order_with(self, first: First) -> Any:
        """Whether an agent did both by the same path, in its own order."""
        return self.is_agent_of(first) & (first.proxy == self.proxy)

    def knows(self, first: First) -> Any:
        """Do the same as `Actor.knows`. Python judges events of other clusters if any are known."""
        same_home = first.home == self.row.home
        require(same_home | ~self._knows_others, self._by_python)
        is_warp = has(first.what, What.WARP)
        by_clock = self._clock(self._clocks, first, same_home & is_warp) >= first.clock
        has_read = (first.kind == READ) & self._bit("reads", first)
        by_bit = self._bit("done", first) | has_read
        return self.is_agent_of(first) | (same_home & is_warp.choice(by_clock, by_bit))

    def may_follow(self, first: First) -> Any:
        """Whether `first` is known to come before, with nothing to report."""
        known = self.knows(first)
        in_memory = known & self._is_fenced(first)
        return self.is_in_tmem.choice(known & self._is_sound_in_tmem(first), in_memory)

    def _is_fenced(self, first: First) -> Any:
        """Whether it is ordered for the path of this access, too."""
        is_warp = has(first.what, What.WARP)
        is_ours = is_warp & (first.home == self.row.home)
        by_clock = self._clock(self._fenced_clocks, first, is_ours) >= first.clock
        by_bit = self.is_agent_of(first) | self._bit("fenced", first)
        needs_none = self._is_generic | (first.proxy != GENERIC)
        return needs_none | is_warp.choice(by_clock, by_bit)

    def _is_sound_in_tmem(self, first: First) -> Any:
        """Return whether the ISA, with its fences, orders an operation in tensor memory."""
        handed_on = ~has(first.what, What.TMEM_COPY) | self._bit("handed_on", first)
        is_fenced = (first.warp == self.row.warp) | (~self._is_unfenced & handed_on)
        is_operation = ~has(first.what, What.WARP)
        return is_operation & ~self._bit("in_practice", first) & is_fenced

    def _clock(self, clocks: Value, first: First, is_ours: Value) -> Any:
        """A warp's clock; of others any."""
        return Ints(clocks.b, clocks.ir)[is_ours.choice(first.slot, 0)]

    def _bit(self, name: str, first: First) -> Any:
        return bit_of(self._given[name], first.slot)


class Following:
    """Finds the state that follows a state, or leaves all to Python.

    Args:
        given: the access's arguments by name.
        by_python: the block that leaves it.
    """

    def __init__(
        self, tables: Tables, made: Made, second: Second, given: dict[str, Any], by_python: Any
    ) -> None:
        self._tables, self._made, self._second, self._given = tables, made, second, given
        self._by_python = by_python
        self._event = given["event"]
        self._b = self._event.b

    def of(self, number: Value) -> Any:
        """The number of the state that follows the one with this number."""
        state = self._tables.state(number)
        found = Variable(number)
        with self._b.if_else((state[OfState.NEXT_EVENT] == self._event).ir) as (same, other):
            with same:
                found.value = state[OfState.NEXT_STATE]
            with other:
                self._judge(number, state, found)
        return found.value

    def _judge(self, number: Value, state: Ints, found: Variable) -> None:
        b = self._b
        done = b.append_basic_block("judged")
        ways: dict[int, Callable[[Value, Ints], Any]] = {
            READ: self._read,
            WRITE: self._write,
            ATOMIC: self._atomic,
        }
        choice = b.switch(self._second.kind.ir, self._by_python)
        for kind, way in ways.items():
            block = b.append_basic_block("kind")
            choice.add_case(constant(kind), block)
            b.position_at_end(block)
            found.value = way(number, state)
            b.branch(done)
        b.position_at_end(done)

    def _first(self, index: Value) -> tuple[Value, First]:
        """Return number and row of the event at an offset of the pool; no mbarrier."""
        number = self._tables.pool[index]
        first = First.load(self._tables.event(number))
        require(~has(first.what, What.MBARRIER), self._by_python)
        return number, first

    @contextmanager
    def _events(self, begin: Value, count: Value) -> Iterator[tuple[Value, First]]:
        """A loop over events in the pool."""
        with when(count > 0), counted(self._b, count) as place:
            yield self._first(begin + place)

    def _read(self, number: Value, state: Ints) -> Any:
        pool, second, made = self._tables.pool, self._second, self._made
        writes, reads, begin = state[OfState.WRITES], state[OfState.READS], state[OfState.AT]
        require((writes >= 0) & (writes <= 1), self._by_python)
        with self._events(begin, writes) as (_, write):
            require(second.may_follow(write), self._by_python)
        of_reads = begin + writes
        result = Variable(number)
        with when(~self._is_only_read(of_reads, reads)):
            first = made.used.value
            last = Variable(first + writes)
            with when(writes == 1):
                pool[first] = pool[begin]
            with self._events(of_reads, reads) as (event, read):
                self._keep_if(~second.knows(read), event, last)
            pool[last.value] = self._event
            count = last.value + 1 - (first + writes)
            # The oldest is forgotten: the state begins after it.
            too_many = (count > MOST_READS).as_number()
            with when(too_many * writes == 1):
                pool[first + too_many] = pool[begin]
            result.value = made.state(first + too_many, writes, count - too_many)
        return result.value

    def _is_only_read(self, place: Value, reads: Value) -> Any:
        """Whether the only read was the agent's, at the same time and by the same path."""
        found = Variable(Value(self._b, I1(0)))
        with when(reads == 1):
            _, only = self._first(place)
            same_clock = only.clock == self._second.row.clock
            is_weak = ~has(only.what, What.STRONG)
            found.value = self._second.is_in_order_with(only) & same_clock & is_weak
        return found.value

    def _write(self, number: Value, state: Ints) -> Any:
        second, tables = self._second, self._tables
        writes, reads, begin = state[OfState.WRITES], state[OfState.READS], state[OfState.AT]
        is_untouched = writes == UNTOUCHED
        writes = is_untouched.choice(0, writes)
        require(writes >= 0, self._by_python)
        with self._events(begin, writes + reads) as (_, first):
            require(second.is_in_order_with(first) | second.may_follow(first), self._by_python)
        # In tensor memory what nobody has read since may be overlapped by something else.
        with when((reads == 0) & (writes > 0) & second.is_in_tmem):
            last = tables.event(tables.pool[begin + writes - 1])[OfEvent.COLUMNS]
            own = tables.event(self._event)[OfEvent.COLUMNS]
            require(last == own, self._by_python)
        return self._made.own_write(self._event)

    def _atomic(self, number: Value, state: Ints) -> Any:
        """Return the state after an atomic that follows atomics of the whole device.

        Other accesses before it are left to Python.
        """
        second, made = self._second, self._made
        writes, reads = state[OfState.WRITES], state[OfState.READS]
        require((writes >= 0) & (reads == 0), self._by_python)
        first = made.used.value
        last = Variable(first)
        with self._events(state[OfState.AT], writes) as (event, before):
            reaches = has(before.what, What.DEVICE)
            require((before.kind == ATOMIC) & reaches, self._by_python)
            is_unknown = ~second.knows(before)
            both = before.what & second.row.what
            adds = ~second.is_in_order_with(before) & has(both, What.ADDS_FLOATS)
            self._keep_if(is_unknown, event, last)
            with when(is_unknown & adds):
                self._note(event)
        result = Variable(number)
        count = last.value - first
        with self._b.if_else((count == 0).ir) as (none, some):
            with none:
                result.value = made.own_write(self._event)
            with some:
                self._tables.pool[last.value] = self._event
                too_many = (count == MOST_WRITES).as_number()
                result.value = made.state(first + too_many, count + 1 - too_many, 0)
        return result.value

    def _keep_if(self, condition: Value, event: Value, last: Variable) -> None:
        """Put an event after those of a new state in the pool, if a condition holds."""
        with when(condition):
            self._tables.pool[last.value] = event
            last.value += 1

    def _note(self, event: Value) -> None:
        """An addition is in no order with the event."""
        work = self._given["work"]
        self._tables.unordered[work[Work.NUM_UNORDERED]] = event
        work[Work.NUM_UNORDERED] = work[Work.NUM_UNORDERED] + 1
