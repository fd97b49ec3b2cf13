"""The asynchronous operations that have not completed, and which of them may take a step now."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptxemu.machine.operation import AsyncOperation

_by_issue = attrgetter("agent_id")


class PendingOperations:
    """Operations in order of issue."""

    def __init__(self) -> None:
        self.ready: list[AsyncOperation] = []
        """Those that wait for no other operation, in order of issue."""
        self._count = 0
        self._behind: dict[AsyncOperation, list[AsyncOperation]] = {}
        """By operation those that wait for it and perhaps for others."""

    def __len__(self) -> int:
        return self._count

    def add(self, operation: AsyncOperation) -> None:
        """An operation was issued; it is the last."""
        self._count += 1
        operation.after = [other for other in operation.after if not other.completed]
        for other in operation.after:
            self._behind.setdefault(other, []).append(operation)
        if not operation.after:
            self.ready.append(operation)

    def keep(self, is_kept: Callable[[AsyncOperation], bool]) -> None:
        """Forget the others, for which none of these waits."""
        self.ready = [operation for operation in self.ready if is_kept(operation)]
        behind = {op: followers for op, followers in self._behind.items() if is_kept(op)}
        self._behind = behind
        waiting = {follower for followers in behind.values() for follower in followers}
        self._count = len(self.ready) + len(waiting)

    def remove(self, operation: AsyncOperation) -> None:
        """An operation that was ready has completed."""
        self._count -= 1
        del self.ready[bisect_left(self.ready, operation.agent_id, key=_by_issue)]
        for follower in self._behind.pop(operation, ()):
            follower.after.remove(operation)
            if not follower.after:
                insort(self.ready, follower, key=_by_issue)
