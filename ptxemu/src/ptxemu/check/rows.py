"""States and events as rows of numbers, so that machine code can judge them.

What is kept of a granule is what `shadow.State` says; of states that are simple, a row says all of
it, and the object is made only where Python needs it. `compiled.judge_rows` has the layout.
"""

from __future__ import annotations

import struct
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from ptxemu.check.granules import Ids
from ptxemu.check.shadow import Page, States, is_simple
from ptxemu.check.state import GPU, NUM_FORMS, WEAK_READ, Event, LoadEvents, State, kind_and_proxy
from ptxemu.check.tmem_page import TmemPage

_FIRST_CAPACITY = 4096
_EVENTS_OF_A_STATE = 8
"""Room in the pool for each state, at first."""


class RowStates(States):
    """The states of a launch as rows.

    Args:
        layout: `ptxemu.compiled.judge_rows`.
        states: the existing states, which the rows replace.
    """

    def __init__(self, layout: ModuleType, states: States) -> None:
        self._layout = layout
        what = layout.What
        self._bits = _bits(layout)
        # Members of enums take long to ask for.
        self._flags = tuple(
            int(flag) for flag in (what.WARP, what.TMEM_COPY, what.MBARRIER, what.ADDS_FLOATS)
        )
        self._fields, self._columns_at = layout.ROW_FIELDS, int(layout.OfEvent.COLUMNS)
        self._num_states = int(layout.Work.NUM_STATES)
        self._num_unordered = int(layout.Work.NUM_UNORDERED)
        self._row = struct.Struct(f"{layout.ROW_FIELDS}i")
        self._objects: list[State | None] = []
        """State objects by number; None for a state without an object."""
        self.events: list[Event | LoadEvents | None] = []
        """Events by number, or what makes them; None for a free number."""
        self.generation = 0
        """Grows whenever numbers of events become free."""
        self._free: list[int] = []
        """Numbers of events that no state has any more."""
        self._tables: dict[int, NDArray[np.int32]] = {}
        self._words = np.zeros(len(layout.Work), dtype=np.int64)
        self.words = self._words.data
        """`Work`."""
        self.address = int(self._words.ctypes.data)
        work = layout.Work
        self._hold(work.FOUND, layout.MOST_STATES)
        self._hold(work.UNORDERED, layout.MOST_STATES * layout.MOST_WRITES)
        self._unordered = self._tables[work.UNORDERED].data
        self._hold(work.EVENTS, _FIRST_CAPACITY * layout.ROW_FIELDS)
        self._hold(work.STATES, _FIRST_CAPACITY * layout.ROW_FIELDS)
        self._hold(work.POOL, _FIRST_CAPACITY * _EVENTS_OF_A_STATE)
        for state in states.table:
            self._add(state)
        for number, state in enumerate(states.table):
            if state.next_event is not None and state.next_state is not None:
                self.follow(number, state.next_event, state.next_state)
            state.next_event = state.next_state = None
        self.uninitialised, self.initialised = states.uninitialised, states.initialised

    def _hold(self, which: int, count: int) -> None:
        """Have room for so many numbers in a table, and keep what is there."""
        layout, old = self._layout, self._tables.get(which)
        table = np.zeros(count, dtype=np.int32)
        if old is not None:
            table[: len(old)] = old
        self._tables[which] = table
        self._words[which] = table.ctypes.data
        if which == layout.Work.STATES:
            self._states = table.data
            self._words[layout.Work.STATES_END] = count // layout.ROW_FIELDS
        elif which == layout.Work.EVENTS:
            self._events = table.data
            self._event_rows = table.reshape(-1, layout.ROW_FIELDS)
        elif which == layout.Work.POOL:
            self._pool = table.data
            self._words[layout.Work.POOL_END] = count

    def make_room(self) -> None:
        """Double the room for states and for the numbers of their events."""
        for which in (self._layout.Work.STATES, self._layout.Work.POOL):
            self._hold(which, 2 * len(self._tables[which]))

    def __len__(self) -> int:
        """Return the number of states."""
        return int(self.words[self._num_states])

    def unordered(self) -> list[Event]:
        """Additions that the access just judged is in no order with."""
        count = self.words[self._num_unordered]
        return [self.event(number) for number in self._unordered[:count]]

    def state(self, number: int) -> State:
        """The object of a state."""
        self._objects.extend([None] * (number + 1 - len(self._objects)))
        state = self._objects[number]
        if state is None:
            at, writes, reads = self._row_of_state(number)
            events = [self.event(one) for one in self._pool[at : at + writes + reads]]
            state = State(tuple(events[:writes]), tuple(events[writes:]))
            state.id = number
            self._objects[number] = state
        return state

    def _row_of_state(self, number: int) -> tuple[int, int, int]:
        """Return the offset of its events in the pool, and its numbers of writes and reads."""
        of = self._layout.OfState
        first = number * self._layout.ROW_FIELDS
        row = self._states[first : first + self._layout.ROW_FIELDS]
        return row[of.AT], row[of.WRITES], row[of.READS]

    def event(self, number: int) -> Event:
        """The event with a number."""
        event = self.events[number]
        if isinstance(event, LoadEvents):
            event = self.events[number] = event.event(number)
        assert event is not None
        return event

    def following(self, number: int, event: Event) -> int:
        """Return the state that `event` led to; -1 if it was not the last event of the state."""
        of = self._layout.OfState
        first = number * self._layout.ROW_FIELDS
        if event.number < 0 or self._states[first + of.NEXT_EVENT] != event.number:
            return -1
        return int(self._states[first + of.NEXT_STATE])

    def follow(self, number: int, event: Event, following: State) -> int:
        """Note the state that follows a state after an event; return its number."""
        of = self._layout.OfState
        own = self.number_of(event)
        new = following.id
        if new < 0:
            is_write = following.writes == (event,) and is_simple(following)
            place = own * self._layout.ROW_FIELDS + self._layout.OfEvent.WRITE_STATE
            is_own = is_write and not following.reads
            new = self._events[place] if is_own else -1
            if new < 0:
                new = self.number(following)
                if is_own:
                    self._events[place] = new
        first = number * self._layout.ROW_FIELDS
        self._states[first + of.NEXT_EVENT], self._states[first + of.NEXT_STATE] = own, new
        return new

    def not_simple(self, numbers: Ids) -> list[int]:
        """See `States`."""
        rows = self._tables[self._layout.Work.STATES].reshape(-1, self._layout.ROW_FIELDS)
        writes = rows[numbers, self._layout.OfState.WRITES]
        return [int(number) for number in numbers[writes < 0]]

    def number(self, state: State) -> int:
        """The state's number; it gets one, and a row, if it has none."""
        if state.id < 0:
            state.id = len(self)
            self._add(state)
        return state.id

    def _add(self, state: State) -> None:
        """Add a state after the last one."""
        layout, work = self._layout, self._layout.Work
        events = (*state.writes, *state.reads)
        used, new = self.words[work.POOL_USED], len(self)
        if new >= self.words[work.STATES_END] or used + len(events) > self.words[work.POOL_END]:
            self.make_room()
        writes, reads = len(state.writes), len(state.reads)
        if not is_simple(state):
            is_untouched = not (events or state.hidden or state.suspects or state.observers)
            writes = layout.UNTOUCHED if is_untouched else layout.BY_PYTHON
            reads, events = 0, ()
        for place, event in enumerate(events, used):
            self._pool[place] = self.number_of(event)
        self._put_row(new, used, writes, reads)
        self.words[work.POOL_USED] += len(events)
        self.words[work.NUM_STATES] = new + 1
        self._objects.extend([None] * (new + 1 - len(self._objects)))
        self._objects[new] = state

    def _put_row(self, number: int, at: int, writes: int, reads: int) -> None:
        row = (at, writes, reads, -1, -1, 0, 0, 0)
        self._row.pack_into(self._states, number * self._row.size, *row)

    def number_of(self, event: Event) -> int:
        """The event's number; it gets one, and a row, if it has none."""
        if event.number >= 0:
            return event.number
        if self._free:
            number = self._free.pop()
            self.events[number] = event
        else:
            number = len(self.events)
            self.events.append(event)
            if number * self._row.size >= self._events.nbytes:
                self._hold(self._layout.Work.EVENTS, 2 * len(self._events))
        event.number = number
        actor = event.actor
        warp, copy, mbarrier, adds_floats = self._flags
        bits = self._bits[event.what]
        if actor.is_warp:
            bits |= warp
        elif actor.copies_tmem:
            bits |= copy
        if event.is_mbarrier:
            bits |= mbarrier
        if event.adds_floats:
            bits |= adds_floats
        self._row.pack_into(
            self._events,
            number * self._row.size,
            actor.number,
            actor.home,
            actor.slot,
            event.clock,
            bits,
            -1 if event.write_state is None else event.write_state.id,
            actor.origin.number,
            -1 if event.columns is None else _columns(event.columns),
        )
        return number

    def put_clock(self, event: Event) -> None:
        """The event's clock is another one."""
        self._event_rows[event.number, self._layout.OfEvent.CLOCK] = event.clock

    def number_loads(self, events: LoadEvents) -> None:
        """Give numbers and rows to new events of loads."""
        first, count, actor = len(self.events), len(events.numbers), events.actor
        if count <= len(self._free):
            reused = self._free[-count:]
            del self._free[-count:]
            for number in reused:
                self.events[number] = events
            numbers = np.array(reused, np.int32)
        else:
            self.events += [events] * count
            numbers = np.arange(first, first + count, dtype=np.int32)
            while (first + count) * self._row.size > self._events.nbytes:
                self._hold(self._layout.Work.EVENTS, 2 * len(self._events))
        self._event_rows[numbers] = (
            *(actor.number, actor.home, actor.slot, events.clock),
            *(self._bits[WEAK_READ] | self._flags[0], -1, actor.origin.number, -1),
        )
        events.numbers, events.generation = numbers, self.generation

    def cover(self, event: Event) -> None:
        """The event's columns may have become more."""
        if event.columns is not None:
            self._events[event.number * self._fields + self._columns_at] = _columns(event.columns)

    def compact(self, pages: list[Page | TmemPage]) -> None:
        """See `States`; events that no state has any more give their numbers back."""
        layout, work = self._layout, self._layout.Work
        kept = sorted({0, 1, *(n for page in pages for n in np.unique(page.ids).tolist())})
        renumbered = np.full(len(self), -1, dtype=np.int32)
        renumbered[kept] = np.arange(len(kept))
        pool = self._tables[work.POOL].copy()
        objects = self._objects + [None] * (len(self) - len(self._objects))
        self._objects = [None] * len(kept)
        held: set[int] = set()
        used = 0
        for new, old in enumerate(kept):
            at, writes, reads = self._row_of_state(old)
            numbers = pool[at : at + max(writes, 0) + reads]
            self._tables[work.POOL][used : used + len(numbers)] = numbers
            self._put_row(new, used, writes, reads)
            used += len(numbers)
            held.update(numbers.tolist())
            state, objects[old] = objects[old], None
            if state is not None:
                state.id, self._objects[new] = new, state
                its = (*state.writes, *state.reads, *state.suspects, *state.hidden)
                held.update(event.number for event in its)
                held.update(event.number for one in state.observers for event in one)
        for state in objects:
            if state is not None:
                state.id = -1
        self.words[work.NUM_STATES], self.words[work.POOL_USED] = len(kept), used
        own = self._event_rows[:, layout.OfEvent.WRITE_STATE]
        own[:] = np.where(own >= 0, renumbered[np.minimum(own, len(renumbered) - 1)], -1)
        self._free_events(held)
        for page in pages:
            page.ids[:] = renumbered[page.ids]

    def _free_events(self, held: set[int]) -> None:
        self.generation += 1
        for number, event in enumerate(self.events):
            if event is not None and number not in held:
                if isinstance(event, Event):
                    event.number = -1
                self.events[number] = None
                self._free.append(number)


def _columns(columns: tuple[int, int]) -> int:
    """First column of tensor memory, and the one after the last, as one number."""
    return columns[0] << 16 | columns[1]


def _bits(layout: ModuleType) -> tuple[int, ...]:
    """Return the bits of an event's row for each value of `what_of`."""
    found = []
    for what in range(NUM_FORMS):
        kind, proxy = kind_and_proxy(what)
        reach = what >> 1 & 3
        bits = kind << layout.KIND | proxy << layout.PROXY
        if reach:
            bits |= int(layout.What.STRONG)
        if reach == GPU:
            bits |= int(layout.What.DEVICE)
        found.append(bits)
    return tuple(found)
