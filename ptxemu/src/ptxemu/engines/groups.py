"""Groups of asynchronous copies: per thread, counted in commits (cp.async and cp.async.bulk)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lanes import ALL_BITS, Mask, bits_of
from ptxemu.machine.state import AsyncOperation, Warp


@dataclass(slots=True, eq=False)
class Member:
    """An operation in the groups of the threads that issued it."""

    operation: AsyncOperation
    lanes: int
    """Threads whose groups hold it, a bit each, those that have waited for it taken out."""
    number: int
    """These threads' number of the group; of no meaning before their commit."""


class Groups:
    """The groups of a warp's threads.

    A thread's groups are numbered by its commits. Waiting until at most n are pending concerns the
    groups numbered up to its count of commits less n.
    """

    def __init__(self) -> None:
        self._committed: dict[int, int] = {0: ALL_BITS}
        """Threads by their number of commits."""
        self._open: list[Member] = []
        self._members: list[Member] = []
        self._read: list[Member] = []
        """Those whose sources all their threads know to have been read: apart, because nobody may
        ever wait for more."""

    def add(self, operation: AsyncOperation, lanes: Mask) -> None:
        """The threads of `lanes` have issued an operation."""
        self._open.append(Member(operation, bits_of(lanes), 0))

    def commit(self, lanes: Mask) -> None:
        """The threads of `lanes` make a group of what they have issued since their last commit."""
        bits = bits_of(lanes)
        committed: dict[int, int] = {}
        grouped: list[tuple[int, int]] = []
        for number, threads in self._committed.items():
            now, others = threads & bits, threads & ~bits
            if now:
                grouped.append((now, number + 1))
                committed[number + 1] = committed.get(number + 1, 0) | now
            if others:
                committed[number] = committed.get(number, 0) | others
        self._committed = committed
        for member in self._open:
            for threads, number in grouped:
                if member.lanes & threads:
                    self._members.append(Member(member.operation, member.lanes & threads, number))
        self._drop_open(bits)

    def due(self, lanes: Mask, pending: int, *, reads_only: bool = False) -> list[Member]:
        """Return what the threads of `lanes` wait for if they allow `pending` incomplete groups."""
        bits = bits_of(lanes)
        latest = [(threads & bits, n - pending) for n, threads in self._committed.items()]
        members = self._members if reads_only else self._read + self._members
        return [m for m in members if any(m.lanes & t and m.number <= n for t, n in latest)]

    def prior(self, lanes: Mask) -> list[Member]:
        """All operations that the threads of `lanes` have issued and not waited for."""
        bits = bits_of(lanes)
        found = (*self._read, *self._members, *self._open)
        return [member for member in found if member.lanes & bits]

    def forget_open(self, lanes: Mask) -> None:
        """Drop what the threads of `lanes` have issued since their last commit."""
        self._drop_open(bits_of(lanes))

    def _drop_open(self, bits: int) -> None:
        for member in self._open:
            member.lanes &= ~bits
        self._open = [member for member in self._open if member.lanes]

    def join(self, members: Sequence[Member], lanes: Mask, *, reads_only: bool = False) -> None:
        """The threads of `lanes` have waited for `members`."""
        bits = bits_of(lanes)
        if reads_only:
            known = [member for member in members if not member.lanes & ~bits]
            self._read += known
            self._members = [member for member in self._members if member not in known]
            return
        for member in members:
            member.lanes &= ~bits
        self._members = [member for member in self._members if member.lanes]
        self._read = [member for member in self._read if member.lanes]


copy_groups: EngineState[Warp, Groups] = EngineState(lambda warp: Groups())
"""A warp's groups of cp.async."""
bulk_groups: EngineState[Warp, Groups] = EngineState(lambda warp: Groups())
"""A warp's groups of bulk copies."""
