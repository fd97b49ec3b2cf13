"""Groups of asynchronous copies: per thread, counted in commits (cp.async and cp.async.bulk)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lanes import has_lanes

if TYPE_CHECKING:
    from ptxemu.machine.lanes import Mask
    from ptxemu.machine.operation import AsyncOperation
    from ptxemu.machine.warp import Warp


@dataclass(slots=True, eq=False)
class Member:
    """An operation in the groups of the threads that issued it."""

    operation: AsyncOperation
    lanes: Mask
    """Threads whose groups hold it, those that have waited for it taken out."""
    numbers: NDArray[np.int64]
    """Each thread's number of the group."""


class Groups:
    """The groups of a warp's threads.

    A thread's groups are numbered by its commits. Waiting until at most n are pending concerns the
    groups numbered up to its count of commits less n.
    """

    def __init__(self) -> None:
        self._commits: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        """Of each thread, or of all while none has committed."""
        self._open: list[Member] = []
        self._members: list[Member] = []
        self._read: list[Member] = []
        """Those whose sources all their threads know to have been read: apart, because nobody may
        ever wait for more."""

    def add(self, operation: AsyncOperation, lanes: Mask) -> None:
        """The threads of `lanes` have issued an operation."""
        self._open.append(Member(operation, lanes.copy(), self._commits))

    def commit(self, lanes: Mask) -> None:
        """The threads of `lanes` make a group of what they have issued since their last commit."""
        self._commits = self._commits + lanes
        if not self._open:
            return
        still_open = []
        for member in self._open:
            grouped = member.lanes & lanes
            if has_lanes(grouped):
                self._members.append(Member(member.operation, grouped, self._commits))
                member.lanes = member.lanes & ~lanes
            if has_lanes(member.lanes):
                still_open.append(member)
        self._open = still_open

    def due(self, lanes: Mask, pending: int, *, reads_only: bool = False) -> list[Member]:
        """What the threads of `lanes` wait for who allow `pending` groups to be incomplete."""
        latest = self._commits - pending
        members = self._members if reads_only else self._read + self._members
        return [m for m in members if has_lanes(m.lanes & lanes & (m.numbers <= latest))]

    def prior(self, lanes: Mask) -> list[Member]:
        """All operations that the threads of `lanes` have issued and not waited for."""
        found = (*self._read, *self._members, *self._open)
        return [member for member in found if has_lanes(member.lanes & lanes)]

    def forget_open(self, lanes: Mask) -> None:
        """Drop what the threads of `lanes` have issued since their last commit."""
        for member in self._open:
            member.lanes = member.lanes & ~lanes
        self._open = [member for member in self._open if has_lanes(member.lanes)]

    def join(self, members: Sequence[Member], lanes: Mask, *, reads_only: bool = False) -> None:
        """The threads of `lanes` have waited for `members`."""
        if reads_only:
            known = [member for member in members if not has_lanes(member.lanes & ~lanes)]
            self._read += known
            self._members = [member for member in self._members if member not in known]
            return
        for member in members:
            member.lanes = member.lanes & ~lanes
        self._members = [member for member in self._members if has_lanes(member.lanes)]
        self._read = [member for member in self._read if has_lanes(member.lanes)]


copy_groups: EngineState[Warp, Groups] = EngineState(lambda warp: Groups())
"""A warp's groups of cp.async."""
bulk_groups: EngineState[Warp, Groups] = EngineState(lambda warp: Groups())
"""A warp's groups of bulk copies."""
