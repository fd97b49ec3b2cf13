"""Races: judges each pair of conflicting accesses, and says which edge is missing between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ptxemu.check import known_order, proxies, tcgen05_order
from ptxemu.check.actors import OperationActor
from ptxemu.check.findings import ONE_VALUE, Entry, Findings, Place, Site
from ptxemu.check.fixed_values import FixedValues
from ptxemu.check.granules import Index
from ptxemu.check.missing_edges import unordered, writes
from ptxemu.check.shadow import Page, ShadowRegion
from ptxemu.check.state import Event, Observation, State
from ptxemu.check.tmem_page import TmemPage
from ptxemu.check.undetermined import Undetermined
from ptxemu.events import AccessKind, Proxy, Space
from ptxemu.syntax.ast import Instruction

MAX_SUSPECTS = 4
"""Reads of a granule before any write that are remembered."""
MAX_ATOMICS = 8
"""Unordered atomics of a granule that are remembered."""
MAX_HIDDEN = 8
"""Hidden accesses of a granule (`State.hidden`) that are remembered."""
MAX_EQUAL = 32
"""Unordered writes of one value that are remembered."""


class Spot(NamedTuple):
    """Granules that an access covers, for the address in a message."""

    space: Space
    region: ShadowRegion
    page: Page | TmemPage
    granules: Index

    def describe(self, state: State) -> str:
        """Name the first address whose state is `state`, before the access changes it."""
        array, index = self.page.located(self.granules)
        position = int(np.argmax(array[index] == state.id))
        address = self.page.address(self.granules, position)
        if self.space is Space.TMEM:
            lane, byte = divmod(address, 2048)
            return f"{self.region.name} lane {lane} column {byte // 4}"
        return f"{self.region.name} 0x{address:x}"


def place(event: Event) -> Place:
    """An event as one of a finding's two sites."""
    return event.actor, event.instruction, event.action


class Races:
    """Judges events against states and reports what the order of events does not allow."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.undetermined = Undetermined(findings)
        self.values = FixedValues()
        self._told: dict[tuple[int, int], Entry] = {}
        """Findings of additions in no order, by the ids of the two instructions."""

    def started(self, program: Any) -> None:
        """The kernel's program is known."""
        self.undetermined.started(program)
        self.values = FixedValues(program)

    def is_fixed(self, instruction: Instruction) -> bool:
        """Whether the value of a store has nothing to do with data."""
        return self.values.is_fixed(instruction)

    def judge(self, state: State, event: Event, spot: Spot) -> State:
        """The state that a granule in `state` has after `event`, whatever stands between them."""
        if event.kind is AccessKind.READ:
            return self._read(state, event, spot)
        return self._write(state, event, spot)

    def _read(self, state: State, event: Event, spot: Spot) -> State:
        actor, reads, suspects = event.actor, state.reads, state.suspects
        if not state.initialised and not any(s.instruction is event.instruction for s in suspects):
            suspects = (*suspects[1 - MAX_SUSPECTS :], event)
        if state.writes and not _is_plainly_known(state.writes, event, spot.space):
            if event.is_non_coherent and not state.writes[0].is_mbarrier:
                self._non_coherent(state.writes[-1], event, state, spot)
            for write in _to_judge(state.writes, event, spot.space):
                self._judge(write, event, state, spot)
        for write in state.hidden:
            if write.kind is not AccessKind.READ and _is_other(write, event):
                self._judge(write, event, state, spot)
        if len(reads) == 1:
            only = reads[0]
            if (
                only.actor is actor
                and only.clock == event.clock
                and only.proxy is event.proxy
                and only.reach <= event.reach
            ):
                return state
        hidden, observers = state.hidden, state.observers
        now = known_order.reads_now(reads, event)
        if event.reach:
            hidden = _united(hidden, (r for r in reads if r.reach < event.reach and actor.knows(r)))
            observers = (*observers, *_observations(event, state))
        return State(
            state.writes,
            now,
            initialised=state.initialised,
            suspects=suspects,
            hidden=hidden,
            observers=observers,
        )

    def _write(self, state: State, event: Event, spot: Spot) -> State:
        actor, is_atomic = event.actor, event.kind is AccessKind.ATOMIC
        if is_atomic and not state.initialised:
            self._uninitialised(state, event, spot)
        suspects: tuple[Event, ...] = ()
        for read in state.suspects:
            if read.actor is actor:
                suspects = (*suspects, read)
            elif actor.knows(read):
                self._uninitialised(state, read, spot)
        for first in (*state.writes, *state.reads, *state.hidden):
            if _is_other(first, event):
                self._judge(first, event, state, spot)
        if spot.space is Space.TMEM and state.writes and not state.reads:
            self._overlap(state.writes[-1], event, state, spot)
        kept: tuple[Event, ...] = ()
        if is_atomic:
            kept = tuple(
                write
                for write in state.writes
                if write.kind is AccessKind.ATOMIC and not actor.knows(write)
            )[1 - MAX_ATOMICS :]
        elif event.is_silent:
            kept = tuple(
                write
                for write in state.writes
                if self._nobody_can_tell(write, event, state) and not actor.knows(write)
            )[1 - MAX_EQUAL :]
        hidden = _hidden_behind(event, state, kept)
        if kept or hidden or suspects:
            before, observed = (*kept, *hidden), state.observers
            if is_atomic:
                observed = (*observed, *_observations(event, state))
            observers = tuple(one for one in observed if one.write in before)
            now = (*kept, event)
            return State(now, (), suspects=suspects, hidden=hidden, observers=observers)
        if event.write_state is None:
            event.write_state = State((event,), ())
        return event.write_state

    def _judge(self, first: Event, second: Event, state: State, spot: Spot) -> None:
        """Report `first` then `second`, of which one writes, unless the order allows it."""
        if first.reach and second.reach and first.is_strong_with(second):
            found = self.undetermined.judge(first, second)
            is_ordered = found is not None and (
                found[0] == self.undetermined.VOLATILE_RACE and _is_observed(first, second, state)
            )
            if found is not None and not is_ordered:
                self._report(found[0], first, second, found[1], state, spot)
            return
        if first.is_mbarrier and not second.is_mbarrier and _is_plain(second):
            self._mbarrier_access(first, second, state, spot)
            return
        if spot.space is Space.TMEM and tcgen05_order.is_collective_dealloc(first, second):
            return
        if second.actor.knows(first):
            missing = proxies.missing_fence(first, second, spot.space)
            if missing is not None:
                code, fence = missing
                self._report(code, first, second, f"needs {fence}", state, spot)
            elif spot.space is Space.TMEM:
                note = tcgen05_order.note(first, second)
                if note is not None:
                    self._report(note[0], first, second, note[1], state, spot)
            return
        if _is_observed(first, second, state):
            return
        if self._nobody_can_tell(first, second, state) and state.initialised:
            edge = "harmless, since the value that is written is the same whatever the data are"
            if second.is_varied and not self.is_fixed(second.instruction):
                edge = "harmless if both compute it alike, as with replicated tiles: all values of "
                edge += "the row, several different ones, were the same"
            self._report("same-value-race", first, second, edge, state, spot)
            return
        equal = ""
        if _changes_nothing(first, second):
            equal = "the value was the same in this run, which other data need not be: "
        # Of two unordered accesses the one whose operation was issued first is named first, but
        # a read of what nobody has written yet came too early.
        if not state.initialised or _start(second) < _start(first):
            first, second = second, first
        if spot.space is Space.TMEM and tcgen05_order.is_too_early(first, second):
            first, second = second, first
        code, edge = unordered(first, second, spot.space)
        is_alike = first.instruction is second.instruction and code == "race" and bool(equal)
        about = ONE_VALUE if is_alike else ""
        self._report(code, first, second, equal + edge, state, spot, about=about)

    def _nobody_can_tell(self, first: Event, second: Event, state: State) -> bool:
        """Whether nobody can tell in which order `first` and `second` came, whatever the data are.

        One of them wrote what was there already, and all that was written there has nothing to do
        with data; or several warps did the same copy, or stored the same row of several values by
        one instruction, as compilers do with a tile that is smaller than the CTA. PTX leaves open
        which of two such writes a read sees, and says that it sees one ("Conflict and Data-races").
        """
        if not _changes_nothing(first, second):
            return False
        one, other = first.actor, second.actor
        if one.is_warp and other.is_warp:
            if second.is_varied and first.instruction is second.instruction:
                return not (first.reach or second.reach)
            known = {*state.writes, *(e for e in (first, second) if writes(e))}
            return bool(state.writes) and all(
                write.kind is AccessKind.WRITE and self.values.is_fixed(write.instruction)
                for write in known
            )
        if isinstance(one, OperationActor) and isinstance(other, OperationActor):
            return (
                second.is_silent
                and first.instruction is second.instruction
                and first.kind is AccessKind.WRITE
                and (one.home, one.issuer_slot) != (other.home, other.issuer_slot)
            )
        return False

    def tell_again(self, firsts: list[Event], event: Event) -> bool:
        """Count additions in no order with `event`; False, and nothing is done, if one of them is
        none of the findings yet."""
        second, code, told = event.instruction, self.undetermined.UNORDERED_ADDITIONS, self._told
        for first in {id(first.instruction): first for first in firsts}.values():
            key = id(first.instruction), id(second)
            if key not in told:
                finding = self._findings.known(code, first.instruction, second)
                if finding is None:
                    return False
                told[key] = finding
        for first in firsts:
            told[id(first.instruction), id(second)].happened(max(first.time, event.time))
        return True

    def _report(
        self,
        code: str,
        first: Event,
        second: Event,
        edge: str,
        state: State,
        spot: Spot,
        *,
        about: str = "",
    ) -> None:
        def message(a: Site | None, b: Site | None) -> str:
            assert a is not None and b is not None
            between = f", between {a.where} and {b.where}" if "needs" in edge else ""
            return f"{a}, and {b}, both of {spot.describe(state)}: {edge}{between}"

        now = max(first.time, second.time)
        self._findings.add(code, place(first), place(second), message, about=about, instance=now)

    def _non_coherent(self, write: Event, read: Event, state: State, spot: Spot) -> None:
        edge = (
            "ld.global.nc reads through a cache that no write of the same kernel reaches: needs a "
            "load without .nc"
        )
        self._report("non-coherent-read", write, read, edge, state, spot)

    def _overlap(self, write: Event, event: Event, state: State, spot: Spot) -> None:
        """TMEM that was written and that nobody has read is written as part of something else."""
        old, new = write.columns, event.columns
        if old == new or old is None or new is None or write.actor is event.actor:
            return
        # tcgen05.st may fill what is never used; tcgen05.dealloc is a warp's.
        if not tcgen05_order.kind_of(write.actor).startswith(("tcgen05.mma", "tcgen05.cp")):
            return
        if event.actor.is_warp or not event.actor.knows(write):
            return
        edge = (
            f"columns {new[0]} to {new[1] - 1} overlap columns {old[0]} to {old[1] - 1}, which "
            "nobody has read since"
        )
        self._report("tmem-overlap", write, event, edge, state, spot)

    def _mbarrier_access(self, first: Event, second: Event, state: State, spot: Spot) -> None:
        message = lambda a, b: (
            f"{b} of {spot.describe(state)}, which holds an mbarrier ({a}): an mbarrier is "
            "opaque; needs mbarrier.inval before its bytes are used for anything else"
        )
        self._findings.add(
            "mbarrier-access", place(first), place(second), message, instance=second.time
        )

    def forget(self, state: State, spot: Spot) -> None:
        """Granules in `state` cease to exist: nobody will write what was read from them."""
        for read in state.suspects:
            self._uninitialised(state, read, spot)

    def _uninitialised(self, state: State, event: Event, spot: Spot) -> None:
        code = "uninitialised-read" if event.actor.is_warp else "uninitialised-async-read"
        if spot.space is Space.TMEM:
            code = "uninitialised-tmem-read"
        message = lambda a, _: f"{a} of {spot.describe(state)}, which nobody has written"
        # A tcgen05.ld moves whole rows, of which a thread may drop what it does not need.
        is_load = isinstance(event.actor, OperationActor) and event.actor.kind == "tcgen05.ld"
        level = "warning" if is_load else None
        self._findings.add(code, place(event), None, message, level=level, instance=event.time)


def _observations(read: Event, state: State) -> Iterator[Observation]:
    """Writes that a strong read or an atomic observes for the first time, without knowing them.

    It observes what the atomics have observed that it observes.
    """
    # Atomics that nothing orders make many observers: one look at each.
    own, by_write = set[Event](), dict[Event, list[Event]]()
    for write, by in state.observers:
        by_write.setdefault(by, []).append(write)
        if by.actor is read.actor:
            own.add(write)
    after = read
    for write in reversed(state.writes):
        if not _observes(after, write):
            return
        for seen in (write, *by_write.get(write, ())):
            if seen not in own and not read.actor.knows(seen):
                own.add(seen)
                yield Observation(seen, read)
        if write.kind is not AccessKind.ATOMIC:
            return
        after = write


def _observes(read: Event, write: Event) -> bool:
    """Whether an access that reads what `write` wrote observes it: the two are morally strong."""
    is_generic = read.proxy is Proxy.GENERIC and write.proxy is Proxy.GENERIC
    return is_generic and bool(write.reach) and read.is_strong_with(write)


def _is_observed(first: Event, second: Event, state: State) -> bool:
    """Whether an access that observed the write `first` comes before `second`: causality.

    Atomics observe what they read, and through atomics what those have observed. What `first`'s
    agent did before is not ordered by that.
    """
    if first.kind is AccessKind.READ or not first.reach:
        return False
    knows = second.actor.knows
    if any(one.write is first and knows(one.by) for one in state.observers):
        return True
    before = first
    following = state.writes[state.writes.index(first) + 1 :] if first in state.writes else ()
    for one in following:
        if one.kind is not AccessKind.ATOMIC or not _observes(one, before):
            return False
        if knows(one):
            return True
        before = one
    return False


def _to_judge(writes: tuple[Event, ...], event: Event, space: Space) -> list[Event]:
    """The last writes that a read is to be judged against; of equal ones one that it may see will
    do."""
    others = [write for write in writes if _is_other(write, event)]
    if len(writes) < 2 or writes[0].kind is AccessKind.ATOMIC:
        return others
    for write in writes:
        if write.is_mbarrier:
            continue
        if write not in others or (
            event.actor.knows(write) and proxies.missing_fence(write, event, space) is None
        ):
            return []
    return others


def _is_plainly_known(writes: tuple[Event, ...], read: Event, space: Space) -> bool:
    """Whether a read has nothing to fear from the last write: most reads of most memory."""
    write = writes[0]
    if len(writes) > 1 or read.is_non_coherent or write.is_mbarrier or space is Space.TMEM:
        return False
    return read.actor.knows(write) and proxies.missing_fence(write, read, space) is None


def _is_other(first: Event, second: Event) -> bool:
    """Whether the two may conflict: not one agent's accesses in its own order."""
    return first.actor is not second.actor or first.proxy is not second.proxy or first.is_mbarrier


def _hidden_behind(event: Event, state: State, kept: tuple[Event, ...]) -> tuple[Event, ...]:
    """Return events that a later access may conflict with though not with the write `event`.

    An access that conflicts with an event before a plain write conflicts with the write too; of a
    write that nobody can tell from those before it (`kept`) any of them will do.
    """
    repeats = event.is_silent and bool(kept)
    if event.reach == 0 and not repeats:
        return ()
    before = (*state.writes, *state.reads) if event.reach else state.writes
    return _united(
        state.hidden,
        (
            one
            for one in before
            if one not in kept
            and (repeats or one.reach < event.reach or _may_be_out_of_reach(one, event))
        ),
    )


def _may_be_out_of_reach(first: Event, event: Event) -> bool:
    """Whether a later access of a narrow scope may be strong with `event`, but not with `first`."""
    return first.actor.cta != event.actor.cta and not event.actor.knows(first)


def _united(hidden: tuple[Event, ...], more: Iterable[Event]) -> tuple[Event, ...]:
    """`hidden` with what is not in it yet; of one agent's at one instruction the latest."""
    for one in more:
        others = tuple(
            h for h in hidden if h.actor is not one.actor or h.instruction is not one.instruction
        )
        hidden = (*others[1 - MAX_HIDDEN :], one)
    return hidden


def _changes_nothing(first: Event, second: Event) -> bool:
    """Whether their order made no difference: one of the two wrote what was there already."""
    return second.is_silent or (first.is_silent and second.kind is AccessKind.READ)


def _is_plain(event: Event) -> bool:
    """Whether this is no mbarrier instruction."""
    return event.instruction.modifiers[0] != "mbarrier"


def _start(event: Event) -> int:
    actor = event.actor
    return actor.issued_at if isinstance(actor, OperationActor) else event.time
