"""Knowledge of the check: agents, their events, and the states of memory that events leave."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu.check.vector_clock import GENERIC, SEEN, TCGEN05, Knowledge, Snapshots
from ptxemu.events import Access, AccessKind, Agent, Loads, Proxy, Space
from ptxemu.syntax.ast import Instruction

# Knowledge that relaxed reads and waits of a warp have seen, and that it has not acquired yet.

_MOST = 8
"""Releases seen at one place that are kept apart."""


class Pending:
    """Knowledge that was seen, by the distance to who released it and by the place.

    A fence acquires what its scope reaches and leaves the rest for a wider one (PTX ISA, "Acquire
    Patterns": a strong read, then a fence); an acquire of the same place takes what was seen there.
    """

    def __init__(self) -> None:
        self._seen: dict[int, dict[Hashable, list[Knowledge]]] = {}

    def __bool__(self) -> bool:
        return bool(self._seen)

    def see(self, level: int, place: Hashable, found: Knowledge) -> None:
        """Note what was seen at a place; it must not change from here on."""
        before = self._seen.setdefault(level, {}).setdefault(place, [])
        if any(one is found for one in before):
            return
        before.append(found)
        if len(before) > _MOST:
            before[:] = [united(before)]

    def see_latest(self, level: int, place: Hashable, found: Knowledge) -> None:
        """The same of a place where what is seen later holds what was seen before."""
        self._seen.setdefault(level, {})[place] = [found]

    def take(self, level: int) -> list[Knowledge]:
        """Acquire what was seen up to a level."""
        taken = []
        for one in [one for one in self._seen if one <= level]:
            for found in self._seen.pop(one).values():
                taken += found
        return distinct(taken)

    def at(self, place: Hashable, level: int) -> list[Knowledge]:
        """All that was seen at a place up to a level."""
        return distinct(
            found
            for one, places in self._seen.items()
            if one <= level
            for found in places.get(place, ())
        )

    def all(self) -> list[Knowledge]:
        """All that was seen."""
        return distinct(
            one for places in self._seen.values() for found in places.values() for one in found
        )


def united(several: list[Knowledge]) -> Knowledge:
    """Knowledge that holds what each of several does."""
    whole = several[0].copy()
    for one in several[1:]:
        whole.unite(one)
    return whole


def distinct(several: list[Knowledge] | Iterator[Knowledge]) -> list[Knowledge]:
    """Each object once."""
    return list({id(one): one for one in several}.values())


# Agents, their events, and states of memory.

_FLOATS = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f64"))
EventKey: TypeAlias = tuple[int, int, bool]
"""id of the instruction; `check.state.what_of`; and `Event.is_varied`."""
CTA, CLUSTER, GPU = 1, 2, 3
"""Reaches of scopes."""
TMEM_ROW_BYTES = 2048
_SLOT_BITS, _SPACE_BITS, _PROXY_BITS = 16, 3, 2


def what_of(access: Access, reach: int) -> int:
    """Kind, proxy, reach and whether it is silent as bits of one number."""
    return access.kind.number << 5 | access.proxy.number << 3 | reach << 1 | access.is_silent


WEAK_READ = AccessKind.READ.number << 5 | Proxy.GENERIC.number << 3
"""`what_of` a weak load."""


def kind_and_proxy(what: int) -> tuple[int, int]:
    """The numbers of the two."""
    return what >> 5, what >> 3 & 3


def _is_quick(what: int) -> bool:
    kind, proxy = kind_and_proxy(what)
    reach = GPU if kind == AccessKind.ATOMIC.number else 0
    return proxy != Proxy.TENSORMAP.number and what & 7 == reach << 1


NUM_FORMS = 1 << 7
"""More than any of `what_of`."""
_IS_QUICK = tuple(map(_is_quick, range(NUM_FORMS)))
"""Whether machine code may judge such an event."""


def adds_floats(access: Access) -> bool:
    """Whether this adds to floating-point numbers in memory."""
    if access.kind is not AccessKind.ATOMIC or "add" not in access.instruction.modifiers:
        return False
    if access.element:
        return access.element[0] not in "us"
    return not _FLOATS.isdisjoint(access.instruction.modifiers)


class Event:
    """One access of an agent. Accesses of one instruction between two ticks are one event."""

    __slots__ = (
        *("actor", "adds_floats", "clock", "columns", "followers", "instruction", "is_behind_sc"),
        *("is_mbarrier", "is_non_coherent", "is_quick", "is_silent", "is_varied", "kind", "lanes"),
        *("number", "proxy", "reach", "reads_with", "since", "time", "what", "write_state"),
    )

    def __init__(self, actor: Actor, access: Access, what: int, reach: int, time: int) -> None:
        kind = access.kind
        self.actor = actor
        self.clock = actor.clock
        self.instruction: Instruction = access.instruction
        self.what = what
        """See `what_of`."""
        self.kind = kind
        self.proxy = access.proxy
        self.reach = reach
        """Reach of the scope of an atomic, or of an access with a memory order (`check.flags`);
        0 for a weak access."""
        self.time = time
        """Its position in the run, to tell which of two unordered accesses came first here."""
        self.is_silent = access.is_silent
        """It wrote what was there already."""
        self.is_varied = access.is_varied
        """See `Access`."""
        self.is_non_coherent = kind is AccessKind.READ and "nc" in access.instruction.modifiers
        """It reads through the path that sees no write of the same kernel."""
        self.lanes = 0
        """The lanes of a warp's weak store, as bits (`check.lanes`)."""
        self.is_mbarrier = False
        """It initialised an mbarrier in these bytes."""
        self.is_behind_sc = actor.has_fenced_sc
        """Its agent has executed a fence.sc."""
        self.adds_floats = kind is AccessKind.ATOMIC and adds_floats(access)
        """It adds to floating-point numbers: in which order decides their last bits."""
        self.write_state: State | None = None
        """The state of bytes that this event was the last to write and nobody read since."""
        self.reads_with: dict[tuple[Event, ...], tuple[Event, ...]] | None = None
        """Reads to remember after this read of an operation, by the reads before it."""
        self.columns: tuple[int, int] | None = None
        """First column in TMEM, and the one after the last."""
        self.since = actor.since
        """Its warp's clock, or its operation's issuer's: what that knew then, it knows; -1 if some
        lanes of the warp know less."""
        self.number = -1
        """Number of its row (`check.rows`); -1 if it has none."""
        self.is_quick = _IS_QUICK[what] and not self.is_non_coherent
        """Machine code may judge it."""
        self.followers: dict[int, int] | None = None
        """Clock since which accesses of a warp, and of what it issues, may follow; by warp, space
        and proxy (`follower`)."""

    def cover(self, access: Access) -> None:
        """Note the columns of TMEM that the event is of."""
        # An access is of the same columns in all its lanes.
        byte = access.starts.item(0) % TMEM_ROW_BYTES
        first, end = byte >> 2, byte + access.size >> 2
        if self.columns is not None:
            first, end = min(first, self.columns[0]), max(end, self.columns[1])
        self.columns = first, end

    def of_lanes(self, access: Access) -> Event:
        """The same of lanes that know less than their warp: not to be taken for judged before."""
        own = Event(self.actor, access, self.what, self.reach, self.time)
        own.since = -1
        if access.space is Space.TMEM:
            own.cover(access)
        return own

    def follower(self, space: Space) -> int:
        """Return the key of this access in `followers`: warp or issuer, space and proxy."""
        origin = self.actor.origin
        bits = space.number << _PROXY_BITS | self.proxy.number
        return (origin.home << _SLOT_BITS | origin.slot) << _SPACE_BITS + _PROXY_BITS | bits

    def is_strong_with(self, other: Event) -> bool:
        """Whether the two are morally strong: each is in the scope of the other."""
        return are_in_reach(min(self.reach, other.reach), self.actor, other.actor)

    @property
    def action(self) -> str:
        """Name in messages: "generic write", "async read"..."""
        if self.is_mbarrier:
            return "mbarrier.init"
        kind = "atomic access" if self.kind is AccessKind.ATOMIC else self.kind.value
        return f"{self.proxy.value} {kind}"


def are_in_reach(reach: int, one: Actor, other: Actor) -> bool:
    """Whether a scope of one agent reaches another; 0 is none."""
    if reach == CTA:
        return one.cta == other.cta
    return reach == GPU or (reach == CLUSTER and one.home == other.home)


class Observation(NamedTuple):
    """A strong read or an atomic, and a write that it observed."""

    write: Event
    by: Event


class State:
    """Accesses to a granule: unordered last writes (atomics: several), and reads since then."""

    __slots__ = (
        *("hidden", "id", "initialised", "next_event", "next_state", "observers", "reads"),
        *("suspects", "writes"),
    )

    def __init__(
        self,
        writes: tuple[Event, ...],
        reads: tuple[Event, ...],
        *,
        initialised: bool = True,
        suspects: tuple[Event, ...] = (),
        hidden: tuple[Event, ...] = (),
        observers: tuple[Observation, ...] = (),
    ) -> None:
        self.id = -1
        self.writes = writes
        self.reads = reads
        self.initialised = initialised
        self.suspects = suspects
        """Reads before any write; they race instead if a write comes that does not know them."""
        self.hidden = hidden
        """Accesses before ones that conflict with less: weak ones before strong ones, writes before
        one that changed nothing."""
        self.observers = observers
        """Strong reads and atomics that observed writes which they do not know, the first of each
        agent."""
        self.next_event: Event | None = None
        """The event that was last applied to this state, with its outcome."""
        self.next_state: State | None = None


class Actor:
    """An agent: its knowledge, and its clock if it is a warp."""

    __slots__ = (
        *("cta", "ctaid", "events", "has_fenced_sc", "home", "inits", "instruction", "know"),
        *("number", "origin", "since", "slot", "unfenced_tcgen05", "warp"),
    )

    is_warp = False
    clock = 0
    """Clock of a warp; all events of an operation happen at once."""
    lagging: tuple[int, Knowledge] | None = None
    """Lanes of a warp that have acquired something since its lanes were synchronised, as bits, and
    the knowledge of its other lanes (`check.lanes`)."""
    copies_tmem = False
    """It is a tcgen05.ld or tcgen05.st."""
    in_practice = 0
    """Operations that hardware, but not the ISA, completes before this operation, as bits."""
    number: int
    """The agent's."""
    issuer_slot: int
    issuer_clock: int
    """Slot of an operation's issuer, and the issuer's clock at the issue."""
    since: int
    """The clock of the warp, or of the operation's issuer when it was issued."""

    def __init__(
        self,
        number: int,
        home: int,
        cta: int,
        ctaid: tuple[int, ...],
        warp: int,
        know: Knowledge,
        slot: int,
    ) -> None:
        self.home = home
        """Index of its cluster."""
        self.cta = cta
        """Index of its CTA in the grid."""
        self.ctaid = ctaid
        self.warp = warp
        """Warp number in the CTA; for an operation that of the warp which issued it."""
        self.know = know
        self.number = number
        self.slot = slot
        """A warp's column in its cluster's clocks; an operation's bit."""
        self.instruction: Instruction | None = None
        """The visible instruction that it executes now, or executed last."""
        self.events: dict[EventKey, Event] = {}
        self.has_fenced_sc = False
        """It has executed a fence.sc of the device: what it reads is no older than that."""
        self.inits: set[Event] = set()
        """Initialisations of mbarriers that it is known to know."""
        self.unfenced_tcgen05 = False
        """It learnt something since its last tcgen05.fence::after_thread_sync."""
        self.since = 0
        self.origin: Actor = self
        """The warp itself, or the operation's issuer."""

    @property
    def label(self) -> str:
        """Name in messages."""
        raise NotImplementedError

    def event(self, access: Access, reach: int, time: int) -> Event:
        """The event that `access` is, or belongs to."""
        what = what_of(access, reach)
        key = id(access.instruction), what, access.is_varied
        event = self.events.get(key)
        if event is None or event.clock != self.clock:
            event = self.events[key] = Event(self, access, what, reach, time)
        if access.space is Space.TMEM:
            event.cover(access)
        return event

    def knows(self, event: Event, row: int = GENERIC) -> bool:
        """Whether `event` happened before what this agent does now."""
        first = event.actor
        if first is self and (row == GENERIC or not self.is_warp):
            return True
        part = self.know.parts.get(first.home)
        if part is None:
            return False
        if first.is_warp:
            return part.clocks.item(row, first.slot) >= event.clock
        if row != GENERIC:
            return bool(part.fenced >> first.slot & 1)
        if part.done >> first.slot & 1:
            return True
        return event.kind is AccessKind.READ and bool(part.reads >> first.slot & 1)

    def knows_by(self, event: Event, row: int) -> bool:
        """Whether a row of clocks, which orders nothing (RELAXED, OUT_OF_SCOPE), has the event."""
        part = self.know.parts.get(event.actor.home)
        if part is None or not event.actor.is_warp:
            return False
        return bool(part.clocks.item(row, event.actor.slot) >= event.clock)

    def knows_past(self, other: Actor, clock: int) -> bool:
        """Whether what `other` did until its `clock` happened before what this agent does now."""
        return other is self or self.know.includes(other.home, other.slot, other.is_warp, clock)

    def has_seen(self, other: Actor, clock: int) -> bool:
        """Whether what `other` did at its `clock` came before in time."""
        part = self.know.parts.get(other.home)
        if other is self or part is None:
            return other is self
        if other.is_warp:
            return part.clocks.item(SEEN, other.slot) >= clock
        # Shifting leaves little of a set of thousands: the latest are asked for.
        return bool(part.done >> other.slot & 1 or part.seen >> other.slot & 1)

    def knows_issue(self, operation: Actor) -> bool:
        """Whether `operation` was issued before what this agent does now happens."""
        part = self.know.parts.get(operation.home)
        return part is not None and bool(
            part.clocks[[GENERIC, TCGEN05], operation.issuer_slot].max() >= operation.issuer_clock
        )


class WarpActor(Actor):
    """A warp. Its clock ticks whenever others may have learnt what it did until now."""

    __slots__ = ("_label", "clock", "fenced", "lagging", "leading", "load_events", "pending")

    is_warp = True

    def __init__(
        self,
        number: int,
        home: int,
        cta: int,
        ctaid: tuple[int, ...],
        warp: int,
        slot: int,
        width: int,
    ) -> None:
        super().__init__(number, home, cta, ctaid, warp, Knowledge(), slot)
        self._label = f"cta ({','.join(map(str, ctaid))}) warp {warp}"
        self.clock = 0
        self.fenced: Snapshots = [None] * (GPU + 1)
        """By level what it knew at its latest release fence of that scope or a wider one, which its
        strong writes release."""
        self.pending = Pending()
        self.lagging = None
        self.load_events: dict[Loads, LoadEvents] = {}
        """Events of its latest loads in a row."""
        self.leading: Knowledge | None = None
        """Knowledge of the warp while an access of the other lanes (`lagging`) is judged."""
        self.know.part(home, width)
        self.tick()

    @property
    def label(self) -> str:
        """Name in messages: "cta (0,0,0) warp 3"."""
        return self._label

    def knows_by_other_lanes(self, event: Event) -> bool:
        """Whether `event` is known to the warp, though not to the lanes whose access is judged."""
        if self.leading is None:
            return False
        know, self.know = self.know, self.leading
        found = self.knows(event)
        self.know = know
        return found

    def tick(self) -> None:
        """Advance the clock: agents that have learnt this agent's past do not know what follows."""
        self.clock += 1
        self.since = self.clock
        clocks = self.know.parts[self.home].clocks
        clocks[GENERIC, self.slot] = clocks[SEEN, self.slot] = self.clock


class LoadEvents:
    """The events of a warp's loads in a row since its last tick, made where Python needs them.

    Args:
        time: of the run, before the first of them.
    """

    __slots__ = ("_agent", "_loads", "_since", "actor", "clock", "generation", "numbers", "time")

    def __init__(self, actor: WarpActor, agent: Agent, loads: Loads, time: int) -> None:
        self.actor, self._agent, self._loads, self.time = actor, agent, loads, time
        self.clock, self._since = actor.clock, actor.since
        self.numbers: NDArray[np.int32] = np.zeros(len(loads.sizes), np.int32)
        """Numbers of their rows (`check.rows`)."""
        self.generation = -1
        """The numbers are valid as long as `RowStates.generation` is this."""

    def event(self, number: int) -> Event:
        """The event of a row."""
        place = int(np.flatnonzero(self.numbers == number)[0])
        access = self._loads.access(self._agent, self.actor.cta, place)
        event = Event(self.actor, access, WEAK_READ, 0, self.time + place + 1)
        event.clock, event.since, event.number = self.clock, self._since, number
        return event
