"""Outcomes that no interleaving shows: strong accesses that hardware may order the other way.

Races say nothing of programs whose accesses are all strong. Beside causality each warp keeps a
second order, of communication: a read comes after the write that it reads, a write after the one
that it overwrites, and after reads of what was there before. Here an access comes after all that
its warp follows in that order. Where causality does not say so too, and the warp has not come to
that location since, another execution of hardware has the two the other way round: store buffering,
load buffering, 2+2W, and their like.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ptxemu.check import races
from ptxemu.check.findings import Findings
from ptxemu.check.state import Event, WarpActor
from ptxemu.check.undetermined import wait_reads
from ptxemu.events import Access, AccessKind, Space
from ptxemu.syntax.ast import Instruction, IntImmediate

MOST_WARPS = 64
"""Warps with strong accesses up to which the order is kept: programs of some threads."""
_MOST_ACCESSES = 8
"""Accesses of a location that are remembered."""
_Steps = dict["WarpActor", int]
"""Strong accesses of each warp that something comes after."""


@dataclass(slots=True)
class _Strong:
    """A strong access."""

    warp: WarpActor
    event: Event
    step: int
    time: int
    observers: dict[WarpActor, Event] = field(default_factory=dict)
    """The first of each agent that observed the write."""


@dataclass(slots=True)
class _Place:
    """Strong accesses of a location."""

    recent: list[_Strong] = field(default_factory=list)
    chain: list[_Strong] = field(default_factory=list)
    """The last write, and what it continues."""
    writes: _Steps = field(default_factory=dict)
    reads: _Steps = field(default_factory=dict)
    """Steps that accesses behind the writes, and behind the reads, come after."""
    visits: dict[WarpActor, int] = field(default_factory=dict)
    """The time of each warp's last access."""


class WeakOrders:
    """The order of communication of the strong accesses of one launch."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._waits: frozenset[int] = frozenset()
        self._places: dict[tuple[Space, int | None, int], _Place] = {}
        self._follows: dict[WarpActor, _Steps] | None = {}
        """Steps that each warp follows; None if there are too many."""

    def started(self, program: Any) -> None:
        """The kernel's program is known."""
        self._waits = wait_reads(program)

    def accessed(self, warp: WarpActor, access: Access, event: Event, time: int) -> None:
        """A strong access of a warp to one location; the warp has acquired nothing by it yet."""
        if self._follows is None or len(set(access.starts.tolist())) != 1:
            return
        follows = self._follows.setdefault(warp, {})
        if len(self._follows) > MOST_WARPS:
            self._follows, self._places = None, {}
            return
        key = access.space, access.owner, access.starts.item(0)
        place = self._places.setdefault(key, _Place())
        writes, reads = (access.kind is not one for one in (AccessKind.READ, AccessKind.WRITE))
        visited = place.visits.get(warp, 0)
        for first in place.recent:
            if (
                visited < first.time
                and follows.get(first.warp, 0) >= first.step
                and self._may_swap(first.event, event)
                and not self._is_ordered(first, warp)
            ):
                self._report(first.event, event)
        _join(follows, place.writes)
        if writes:
            _join(follows, place.reads)
        follows[warp] = step = follows.get(warp, 0) + 1
        _join(place.writes if writes else place.reads, follows)
        place.visits[warp] = time
        own = _Strong(warp, event, step, time)
        observes = reads and bool(place.chain) and _is_strong(place.chain[-1].event, event)
        if observes:
            for one in place.chain:
                one.observers.setdefault(warp, event)
        if writes:
            place.chain = [*place.chain[1 - _MOST_ACCESSES :], own] if observes else [own]
        others = [one for one in place.recent if one.event is not event]
        place.recent = [*others[1 - _MOST_ACCESSES :], own]

    def _may_swap(self, first: Event, second: Event) -> bool:
        """Whether it matters which of two accesses comes first, and they do not race."""
        if first.actor is second.actor or not _is_strong(first, second):
            return False
        kinds = first.kind, second.kind
        if AccessKind.READ in kinds:
            read = first if first.kind is AccessKind.READ else second
            both_read = kinds == (AccessKind.READ, AccessKind.READ)
            return not both_read and read.instruction.pc not in self._waits
        if kinds != (AccessKind.ATOMIC, AccessKind.ATOMIC):
            return True
        # A loop may wait by an atomic that changes nothing; reading the other value synchronises.
        awaits = any(_changes_nothing(one.instruction) for one in (first, second))
        return not awaits and not _is_red(second)

    def _is_ordered(self, first: _Strong, warp: WarpActor) -> bool:
        return warp.knows(first.event) or any(warp.knows(one) for one in first.observers.values())

    def _report(self, first: Event, second: Event) -> None:
        message = lambda a, b: (
            f"{a}, and {b}: here one comes after the other by what their threads have read and "
            "written, but nothing in the memory model says so: hardware may have it the other "
            f"way round: needs fence.sc, or a release and an acquire, between {a.where} and "
            f"{b.where}"
        )
        self._findings.add(
            "weak-order", races.place(first), races.place(second), message, instance=second.time
        )


def _is_strong(first: Event, second: Event) -> bool:
    return first.actor is second.actor or first.is_strong_with(second)


def _is_red(event: Event) -> bool:
    return event.instruction.modifiers[0] == "red"


def _changes_nothing(instruction: Instruction) -> bool:
    """Whether an atomic of acquire semantics writes the value that was there."""
    modifiers = instruction.modifiers
    return (
        modifiers[0] == "atom"
        and "acquire" in modifiers
        and not {"or", "add", "xor"}.isdisjoint(modifiers)
        and isinstance(last := instruction.operands[-1], IntImmediate)
        and last.value == 0
    )


def _join(known: _Steps, more: _Steps) -> None:
    for warp, step in more.items():
        if known.get(warp, 0) < step:
            known[warp] = step
