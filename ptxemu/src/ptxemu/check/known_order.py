"""Quick verdicts for most accesses, which come after everything that conflicts with them.

What an agent knows by a clock is looked up once an access; what is not known is left to
`check.races`.
"""

from __future__ import annotations

import sys
from typing import TypeAlias

from ptxemu.check import proxies
from ptxemu.check.actors import OperationActor
from ptxemu.check.state import Actor, Event, State
from ptxemu.check.vector_clock import GENERIC
from ptxemu.events import AccessKind, Proxy, Space

MAX_READS = 32
"""Unordered reads of a granule that are remembered; older ones are forgotten."""
Limits: TypeAlias = "dict[tuple[Actor, int], int]"
"""Last clock of earlier accesses that an access may follow, by their warp, and by their proxy and
kind as bits."""


def after(state: State, event: Event, space: Space, limits: Limits) -> State | None:
    """Return the state after an event that is in order; None if that is not sure.

    Args:
        limits: what was found for this access, and is added to.
    """
    if event.reach or state.hidden or state.suspects or state.observers:
        return None
    if space is Space.TMEM:
        return _after_in_tmem(state, event)
    if event.kind is AccessKind.READ:
        return _after_read(state, event, space, limits)
    if event.kind is AccessKind.WRITE and not event.is_silent:
        return _after_write(state, event, space, limits)
    return None


def may_read(state: State, whose: int, since: int) -> bool:
    """Whether a weak read in general memory comes after an operation that was judged before.

    Args:
        whose, since: of the read (`Event.follower`, `Event.since`).
    """
    if state.hidden or state.suspects or state.observers or len(state.writes) != 1:
        return False
    followers = state.writes[0].followers
    return followers is not None and followers.get(whose, sys.maxsize) <= since


def _after_read(state: State, event: Event, space: Space, limits: Limits) -> State | None:
    if not state.initialised or event.is_non_coherent:
        return None
    writes = state.writes
    if writes:
        if len(writes) > 1:
            return None
        write = writes[0]
        if write.is_mbarrier or not _may_follow(write, event, space, limits):
            return None
    return read_too(state, event)


def read_too(state: State, event: Event) -> State:
    """Return the state after a weak read that may come here."""
    reads = state.reads
    if len(reads) == 1:
        only = reads[0]
        if (
            only.actor is event.actor
            and only.clock == event.clock
            and only.proxy is event.proxy
            and not only.reach
        ):
            return state
    return State(state.writes, reads_now(reads, event))


def _after_write(state: State, event: Event, space: Space, limits: Limits) -> State | None:
    for first in (*state.writes, *state.reads) if state.reads else state.writes:
        if first.is_mbarrier:
            return None
        if (first.actor is not event.actor or first.proxy is not event.proxy) and not _may_follow(
            first, event, space, limits
        ):
            return None
    if event.write_state is None:
        event.write_state = State((event,), ())
    return event.write_state


def _after_in_tmem(state: State, event: Event) -> State | None:
    """The same in tensor memory, for operations that one warp has issued."""
    operation, is_read = event.actor, event.kind is AccessKind.READ
    if not isinstance(operation, OperationActor) or not state.initialised:
        return None
    writes, reads = state.writes, state.reads
    if len(writes) > 1 if is_read else event.kind is not AccessKind.WRITE or event.is_silent:
        return None
    for first in writes if is_read else (*writes, *reads):
        before = first.actor
        if before is operation and first.proxy is event.proxy:
            continue
        if before.is_warp or before.origin is not operation.origin or not operation.knows(first):
            return None
        if operation.in_practice >> before.slot & 1:
            return None
    if is_read:
        return read_too(state, event)
    if writes and not reads and writes[-1].columns != event.columns:
        return None
    if event.write_state is None:
        event.write_state = State((event,), ())
    return event.write_state


def _may_follow(first: Event, event: Event, space: Space, limits: Limits) -> bool:
    """Whether `first` is known to happen before `event`, and for its proxy too."""
    before = first.actor
    if before.is_warp and event.proxy is not Proxy.TENSORMAP:
        key = before, first.proxy.number << 2 | first.kind.number
        limit = limits.get(key)
        if limit is None:
            limit = limits[key] = _known_clock(first, event, space)
        return first.clock <= limit
    # What a warp knows of an operation, the operations that it issues later know too.
    whose = event.follower(space)
    followers = first.followers
    if followers is not None and followers.get(whose, sys.maxsize) <= event.since:
        return True
    actor = event.actor
    if not actor.knows(first) or proxies.missing_fence(first, event, space) is not None:
        return False
    if event.since >= 0 and (
        actor.is_warp or (before.home == actor.home and _is_known_to_issuer(before, actor))
    ):
        if followers is None:
            followers = first.followers = {}
        followers[whose] = event.since
    return True


def _is_known_to_issuer(before: Actor, operation: Actor) -> bool:
    """Whether an operation knows of `before` by its issuer, not only by the order of the two."""
    assert isinstance(operation, OperationActor)
    return not before.is_warp and bool(operation.done_at_issue >> before.slot & 1)


def _known_clock(first: Event, event: Event, space: Space) -> int:
    """The clock of the warp of `first` up to which accesses like it may come before `event`."""
    actor, before = event.actor, first.actor
    needs_fence = first.proxy is Proxy.GENERIC and event.proxy is not Proxy.GENERIC
    if before is actor and not needs_fence:
        return sys.maxsize
    part = actor.know.parts.get(before.home)
    if part is None:
        return -1
    clock = sys.maxsize if before is actor else part.clocks.item(GENERIC, before.slot)
    row = proxies.ROW_OF_SPACE.get(space)
    if needs_fence and row is not None:
        clock = min(clock, part.clocks.item(row, before.slot))
    return int(clock)


def reads_now(reads: tuple[Event, ...], event: Event) -> tuple[Event, ...]:
    """The reads to remember after the read `event`."""
    # A write that knows this event knows the reads that this event knows.
    actor, before = event.actor, event.reads_with
    if before is not None and reads in before:
        return before[reads]
    kept = [read for read in reads if not actor.knows(read)]
    now = (*kept[-(MAX_READS - 1) :], event)
    if not actor.is_warp:  # what an operation knows does not change while it acts
        if before is None:
            before = event.reads_with = {}
        before[reads] = now
    return now
