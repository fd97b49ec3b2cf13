"""Asynchronous operations as the check sees them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.check.state import Actor, Event, EventKey, WarpActor
from ptxemu.check.vector_clock import GENERIC, NOTHING, TCGEN05
from ptxemu.events import AccessKind

COMMIT = "tcgen05.commit"
"""The operation that completes when those before it have; a commit includes the one before it."""
MMA = "tcgen05.mma"
ARRIVAL = "cp.async.mbarrier.arrive"
"""The operation that completes when a thread's cp.async have; waiting for it waits for them."""
_NO_EVENTS: dict[EventKey, Event] = {}
_NO_INITS: set[Event] = set()


class OperationActor(Actor):
    """An asynchronous operation; it knows what its issuer knew."""

    __slots__ = (
        *("_known_clocks", "_past", "copies_tmem", "done_at_issue", "in_practice", "issued_at"),
        *("issuer_clock", "issuer_label", "issuer_slot", "joined", "joined_reads", "kind"),
        *("signals_peers", "uses_async_proxy"),
    )

    def __init__(
        self, agent_id: int, kind: str, issuer: WarpActor, bit: int, issued_at: int
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
        """Warps' clocks that a completed product knew."""
        self.in_practice = 0
        self.joined = self.joined_reads = False
        """A warp has waited for it, or for its having read its sources."""
        self.issuer_slot, self.issuer_clock = issuer.slot, issuer.clock
        self.origin, self.since = issuer, issuer.clock
        self.done_at_issue = self.know.parts[self.home].done
        """The operations that its issuer knew to be done; others are done by `complete_after`."""
        self._past = 0
        """Operations done when a COMMIT or ARRIVAL completed, as bits; kept until the next
        commit, or the wait."""
        issuer.tick()

    @property
    def label(self) -> str:
        """Name in messages: "tcgen05.mma #17 issued by cta (0,0,0) warp 12"."""
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
        """Do the same as `complete_after` for an order that the ISA does not state."""
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

    def knows_issue(self, operation: Actor) -> bool:
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
