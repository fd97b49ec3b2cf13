"""Lifetimes: who touches the shared memory or TMEM of a CTA that may not run.

INVARIANT: a CTA has started if one of its warps was heard of, in time at least: a relaxed arrival
at the cluster's barrier is enough. Its exit is ordered after everything that one of its warps knew
when it exited; an access from outside that none of them knew may come after the exit.

A copy that may still read the CTA's own shared memory is an error only if another CTA started
after the exit, which may have got that memory: kernels that ship exit without waiting for their
last stores to have read, and where the memory stays as it was nobody can tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ptxemu.check import races
from ptxemu.check.actors import OperationActor
from ptxemu.check.findings import Findings, Place
from ptxemu.check.missing_edges import completion
from ptxemu.check.state import Actor, Event, WarpActor
from ptxemu.check.vector_clock import GENERIC, SEEN, Knowledge
from ptxemu.engines.mbarrier import mbarriers
from ptxemu.events import AccessKind
from ptxemu.syntax.ast import Instruction

_COPIES = ("cp.async.bulk", "cp.reduce.async.bulk")
_READERS = (*_COPIES, "tcgen05.ld")
_PAIRED = ("tcgen05", "alloc", "cta_group::2")
_NEEDS_START = (
    "needs a cluster barrier before it, at which all CTAs arrive (barrier.cluster.arrive.relaxed "
    "is enough)"
)


class Lifetimes:
    """Accesses to CTAs' memory by operations and by other CTAs, until the CTA exits."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._labels: dict[int, str] = {}
        self._slots: dict[int, slice] = {}
        """Columns of a CTA's warps in its cluster's clocks."""
        self._peers: dict[int, int] = {}
        """The other CTA of a CTA's pair."""
        self._met: set[tuple[int, Actor]] = set()
        """CTAs whose start an agent knows of."""
        self._touches: dict[int, dict[tuple[Actor, bool], Event]] = {}
        self._signals: dict[int, dict[Actor, tuple[int, Place]]] = {}
        self._exits: dict[int, Knowledge] = {}
        self._barriers: dict[str, dict[int, Any]] = {}
        self._unread: list[tuple[int, Event]] = []
        """Reads of own shared memory that may come after the exit, by CTA."""

    def started(self, cta: Any) -> None:
        """A CTA became resident, maybe where one that has exited was."""
        for other, event in self._unread:
            self._report_read(other, event, level="error")
        self._unread.clear()
        self._labels[cta.index] = f"cta ({','.join(map(str, cta.ctaid))})"
        self._slots[cta.index] = slice(cta.rank * len(cta.warps), (cta.rank + 1) * len(cta.warps))
        self._touches[cta.index] = {}
        self._signals[cta.index] = {}
        if cta.rank ^ 1 < len(cta.cluster.ctas):
            self._peers[cta.index] = cta.cluster.ctas[cta.rank ^ 1].index

    def touched(self, cta: int, event: Event) -> None:
        """An operation, or a warp of another CTA, accessed the CTA's shared memory or TMEM."""
        self._meet(cta, event)
        touches = self._touches.get(cta)
        if touches is not None:
            touches[event.actor, event.kind is AccessKind.READ] = event
        elif cta in self._exits:
            self._report_touch(cta, event)

    def signalled(self, cta: int, actor: Actor, place: Place) -> None:
        """An operation, or a warp of another CTA, arrived on one of the CTA's mbarriers."""
        signals = self._signals.get(cta)
        if signals is not None:
            signals[actor] = (actor.clock, place)
        elif cta in self._exits:
            self._report_signal(cta, actor, place)

    def _meet(self, cta: int, event: Event) -> None:
        """Does the agent know that the CTA has started? Of arrivals at its mbarriers their
        initialisation says so."""
        actor = event.actor
        if actor.cta == cta or (cta, actor) in self._met or cta not in self._slots:
            return
        self._met.add((cta, actor))
        if self._has_started(cta, actor):
            return
        label = self._labels[cta]
        message = lambda first, _: (
            f"{first} of shared memory of {label}, which may not have started: {_NEEDS_START}"
        )
        self._findings.add("dsmem-entry", races.place(event), None, message)

    def _has_started(self, cta: int, actor: Actor) -> bool:
        part = actor.know.parts.get(actor.home)
        clocks = None if part is None else part.clocks[[GENERIC, SEEN], self._slots[cta]]
        return clocks is not None and clocks.max() > 0

    def pairs(self, actor: WarpActor, instruction: Instruction) -> None:
        """A warp executes what its lanes meet for: does a pair's allocation know of the peer?"""
        if instruction.modifiers[:3] != _PAIRED:
            return
        peer = self._peers.get(actor.cta)
        if peer is None or peer not in self._slots or self._has_started(peer, actor):
            return
        label = self._labels[peer]
        message = lambda first, _: (
            f"{first}: the peer, {label}, may not have started, which the ISA wants to be sure "
            f"of: {_NEEDS_START}"
        )
        self._findings.add("tmem-alloc-entry", (actor, instruction, ""), None, message)

    def exited(self, cta: Any, warps: Iterable[WarpActor]) -> None:
        """All warps of a CTA have exited; what their relaxed waits saw came before that too."""
        known = Knowledge()
        for warp in warps:
            known.unite(warp.know)
            for seen in warp.pending.all():
                known.unite(seen)
        self._exits[cta.index] = known
        for event in self._touches.pop(cta.index, {}).values():
            reads = event.kind is AccessKind.READ
            first = event.actor
            if not known.includes(first.home, first.slot, first.is_warp, event.clock, reads=reads):
                self._report_touch(cta.index, event)
        for actor, (clock, place) in self._signals.pop(cta.index, {}).items():
            if actor.is_warp:
                is_seen = known.has_seen(actor.home, actor.slot, clock)
            else:
                is_seen = known.includes(actor.home, actor.slot, False, clock)
            if not is_seen:
                self._report_signal(cta.index, actor, place)
        barriers = mbarriers.peek(cta)
        if barriers is not None:
            self._barriers[self._labels[cta.index]] = barriers.by_offset

    def finish(self) -> None:
        """The run is over: what do the mbarriers of the exited CTAs look like?"""
        for label, by_offset in self._barriers.items():
            for offset, barrier in by_offset.items():
                self._finish_barrier(f"the mbarrier at shared 0x{offset:x} of {label}", barrier)
        self._barriers.clear()

    def _finish_barrier(self, name: str, barrier: Any) -> None:
        if barrier.tx_count:
            message = lambda a, b: (
                f"{name} ends with tx-count {barrier.tx_count} in phase {barrier.phase}: bytes "
                "were expected that nothing delivered, or delivered and not expected"
            )
            self._findings.add("mbarrier-tx-left", None, None, message)
        elif 0 < barrier.pending < barrier.expected:
            message = lambda a, b: (
                f"{name} ends with {barrier.pending} of {barrier.expected} arrivals missing in "
                f"phase {barrier.phase}"
            )
            self._findings.add("mbarrier-arrivals-left", None, None, message)

    def _report_touch(self, cta: int, event: Event) -> None:
        label = self._labels[cta]
        if event.actor.is_warp:
            message = lambda first, _: (
                f"{first} of shared memory of {label}, which may have exited: needs a cluster "
                f"barrier or an mbarrier between it and the exit of {label}"
            )
            self._findings.add("dsmem-exit", races.place(event), None, message)
            return
        assert isinstance(event.actor, OperationActor)
        kind, needed = event.actor.kind, completion(event, event.actor)
        is_own_read = event.actor.cta == cta and event.kind is AccessKind.READ
        if is_own_read and kind.startswith(_READERS):
            self._report_read(cta, event, level="warning")
            if kind.startswith(_COPIES):
                self._unread.append((cta, event))
            return
        self._findings.add(
            "async-after-exit",
            races.place(event),
            None,
            lambda first, _: (
                f"{first} in {label} may happen after the exit of {label}: needs {needed} before "
                "the exit"
            ),
            # Threads' own loads hold the CTA's memory on hardware, though the ISA is silent.
            level="warning" if kind == "cp.async" else None,
        )

    def _report_read(self, cta: int, event: Event, *, level: str) -> None:
        label = self._labels[cta]
        assert isinstance(event.actor, OperationActor)
        needed = completion(event, event.actor)
        then = ", when the memory may be another CTA's" if level == "error" else ""
        message = lambda first, _: (
            f"{first} in {label} may happen after the exit of {label}{then}: needs {needed} "
            "before the exit"
        )
        self._findings.add("read-after-exit", races.place(event), None, message, level=level)

    def _report_signal(self, cta: int, actor: Actor, place: Place) -> None:
        label = self._labels[cta]
        message = lambda first, _: (
            f"{first} on an mbarrier of {label} may happen after its exit: no warp of {label} "
            "waits for it"
        )
        # Into another CTA the memory may be another cluster's by then.
        level = "error" if actor.cta != cta else None
        self._findings.add("signal-after-exit", place, None, message, level=level)
