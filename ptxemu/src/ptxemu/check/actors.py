"""Agents as the check sees them: warps and asynchronous operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu.check.event import Event, what_of
from ptxemu.check.vector_clock import GENERIC, NOTHING, RELAXED, SEEN, TCGEN05, Knowledge
from ptxemu.events import Access, AccessKind, Space

if TYPE_CHECKING:
    from ptxemu.syntax.ast import Instruction

COMMIT = "tcgen05.commit"
"""The operation that completes when those before it have; a commit includes the one before it."""
MMA = "tcgen05.mma"
ARRIVAL = "cp.async.mbarrier.arrive"
"""The operation that completes when a thread's cp.async have; waiting for it waits for them."""
EventKey: TypeAlias = tuple[int, int]
"""id of the instruction; and `check.event.what_of`."""
_NO_EVENTS: dict[EventKey, Event] = {}
_NO_INITS: set[Event] = set()


class Actor:
    """An agent: its knowledge, and its clock if it is a warp."""

    __slots__ = (
        "cta",
        "ctaid",
        "events",
        "has_fenced_sc",
        "home",
        "inits",
        "instruction",
        "know",
        "number",
        "origin",
        "since",
        "slot",
        "unfenced_tcgen05",
        "warp",
    )

    is_warp = False
    clock = 0
    """Of a warp; an operation's events all happen at once."""
    lagging: tuple[int, Knowledge] | None = None
    """Of a warp: lanes that have acquired something since the warp's lanes were synchronised, as
    bits, and what the others know (`check.lanes`)."""
    copies_tmem = False
    """It is a tcgen05.ld or tcgen05.st."""
    in_practice = 0
    """Of an operation: those that hardware, but not the ISA, completes before this one."""
    number: int
    """The agent's."""
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
        """For people."""
        raise NotImplementedError

    def event(self, access: Access, reach: int, time: int) -> Event:
        """The event that `access` is, or belongs to."""
        what = what_of(access, reach)
        key = id(access.instruction), what
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

    def knows_by_relaxed(self, event: Event) -> bool:
        """Whether a relaxed barrier of the cluster stands between the warp's `event` and now."""
        part = self.know.parts.get(event.actor.home)
        if part is None or not event.actor.is_warp:
            return False
        return bool(part.clocks.item(RELAXED, event.actor.slot) >= event.clock)

    def knows_past(self, other: Actor, clock: int) -> bool:
        """Whether what `other` did until its `clock` happened before what this agent does now."""
        return other is self or self.know.includes(other.home, other.slot, other.is_warp, clock)

    def has_seen(self, other: Actor, clock: int) -> bool:
        """Whether what `other`, of the same cluster, did at its `clock` came before in time."""
        part = self.know.parts.get(other.home)
        if other is self or part is None:
            return other is self
        if other.is_warp:
            return part.clocks.item(SEEN, other.slot) >= clock
        # Shifting leaves little of a set of thousands: the latest are asked for.
        return bool(part.done >> other.slot & 1 or part.seen >> other.slot & 1)

    def knows_issue(self, operation: OperationActor) -> bool:
        """Whether `operation` was issued before what this agent does now happens."""
        part = self.know.parts.get(operation.home)
        return part is not None and bool(
            part.clocks[[GENERIC, TCGEN05], operation.issuer_slot].max() >= operation.issuer_clock
        )


class WarpActor(Actor):
    """A warp. Its clock ticks whenever others may have learnt what it did until now."""

    __slots__ = ("_label", "clock", "lagging", "leading", "released_by_fence", "to_acquire")

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
        self.released_by_fence: tuple[Knowledge, str] | None = None
        """What its last fence made fit to be released by a relaxed store, and the scope."""
        self.to_acquire: Knowledge | None = None
        """What relaxed loads have seen; its next fence acquires it."""
        self.lagging = None
        self.leading: Knowledge | None = None
        """While an access of those others is judged: what the warp knows."""
        self.know.part(home, width)
        self.tick()

    @property
    def label(self) -> str:
        """For people: "cta (0,0,0) warp 3"."""
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
        """What follows is not known to those who have learnt this agent's past."""
        self.clock += 1
        self.since = self.clock
        clocks = self.know.parts[self.home].clocks
        clocks[GENERIC, self.slot] = clocks[SEEN, self.slot] = self.clock


class OperationActor(Actor):
    """An asynchronous operation; it knows what its issuer knew."""

    __slots__ = (
        "_known_clocks",
        "_past",
        "copies_tmem",
        "done_at_issue",
        "in_practice",
        "issued_at",
        "issuer_clock",
        "issuer_label",
        "issuer_slot",
        "joined",
        "joined_reads",
        "kind",
        "signals_peers",
        "uses_async_proxy",
    )

    def __init__(
        self,
        agent_id: int,
        kind: str,
        issuer: WarpActor,
        bit: int,
        issued_at: int,
    ) -> None:
        super().__init__(
            agent_id, issuer.home, issuer.cta, issuer.ctaid, issuer.warp, issuer.know.copy(), bit
        )
        self.kind = kind
        self.copies_tmem = kind in ("tcgen05.ld", "tcgen05.st")
        self.issuer_label = issuer.label
        self.issued_at = issued_at
        generic = kind.startswith(("cp.async", "st.async", "red.async"))
        self.uses_async_proxy = not generic or "bulk" in kind
        """cp.async without bulk, st.async and red.async are of the generic proxy."""
        self.signals_peers = False
        """A commit that arrives on mbarriers of other CTAs."""
        self.unfenced_tcgen05 = issuer.unfenced_tcgen05
        self._known_clocks: NDArray[np.int32] | None = None
        """Of a product that has completed: the warps' clocks that it knew."""
        self.in_practice = 0
        self.joined = self.joined_reads = False
        """A warp has waited for it, or for its having read its sources."""
        self.issuer_slot, self.issuer_clock = issuer.slot, issuer.clock
        self.origin, self.since = issuer, issuer.clock
        self.done_at_issue = self.know.parts[self.home].done
        """The operations that its issuer knew to be done; others are done by `complete_after`."""
        self._past = 0
        """Of a COMMIT or ARRIVAL that has completed: the operations done then; until the next
        commit, or the wait."""
        issuer.tick()

    @property
    def label(self) -> str:
        """For people: "tcgen05.mma #17 issued by cta (0,0,0) warp 12"."""
        return f"{self.kind} #{self.number} issued by {self.issuer_label}"

    def complete_after(self, other: Actor) -> None:
        """`other` is done before this operation acts: the ISA executes the two in order."""
        part = self.know.parts.get(other.home)
        if part is None or not isinstance(other, OperationActor):
            return
        past = other.know.parts.get(other.home)
        part.done |= other._past if past is None else past.done
        # What an earlier commit waited for is done, but its signal may be on its way to a peer.
        if not (self.kind == other.kind == COMMIT and other.signals_peers):
            part.done |= 1 << other.slot
        if self.kind == other.kind == COMMIT:
            other._past = 0

    def complete_after_in_practice(self, other: Actor) -> None:
        """As `complete_after`, though the ISA does not say so."""
        part = self.know.parts.get(other.home)
        if part is not None and not part.done >> other.slot & 1:
            self.complete_after(other)
            self.in_practice |= 1 << other.slot

    def forget(self) -> None:
        """It has completed: it does nothing more, and few will ask what it knew."""
        if self.kind in (COMMIT, ARRIVAL):
            self._past = self.know.parts[self.home].done
        elif self.kind == MMA:
            clocks = self.know.parts[self.home].clocks
            self._known_clocks = np.maximum(clocks[GENERIC], clocks[TCGEN05])
        self.know = NOTHING
        self.events, self.inits = _NO_EVENTS, _NO_INITS

    def knows_issue(self, operation: OperationActor) -> bool:
        """Whether `operation` was issued before this one."""
        if self._known_clocks is not None and operation.home == self.home:
            return bool(self._known_clocks[operation.issuer_slot] >= operation.issuer_clock)
        return super().knows_issue(operation)

    def is_awaited(self, event: Event) -> bool:
        """Whether a warp has waited for its access `event`; others may not know of that."""
        return self.joined or (self.joined_reads and event.kind is AccessKind.READ)

    def take_past(self) -> int:
        """The operations that are done when this one is."""
        past, self._past = self._past, 0
        return past | 1 << self.slot
