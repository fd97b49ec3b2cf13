"""The asynchronous operations that have not completed, and which of them may take a step now."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar


class Ordered(Protocol):
    """An operation that others may have to complete before."""

    agent_id: int
    completed: bool
    after: list[Any]
    """Operations that complete before it may take a step."""


OperationT = TypeVar("OperationT", bound=Ordered)


class PendingOperations(Generic[OperationT]):
    """Operations in order of issue."""

    def __init__(self) -> None:
        self.ready: list[OperationT] = []
        """Those that wait for no other operation, in order of issue."""
        self._ids: list[int] = []
        """Their agent ids, which grow."""
        self._count = 0
        self._behind: dict[OperationT, list[OperationT]] = {}
        """Operations that wait for an operation, and perhaps for others, by that operation."""

    def __len__(self) -> int:
        return self._count

    def add(self, operation: OperationT) -> None:
        """An operation was issued; it is the last."""
        self._count += 1
        if operation.after:
            operation.after = [other for other in operation.after if not other.completed]
        for other in operation.after:
            self._behind.setdefault(other, []).append(operation)
        if not operation.after:
            self.ready.append(operation)
            self._ids.append(operation.agent_id)

    def keep(self, is_kept: Callable[[OperationT], bool]) -> None:
        """Forget the others, for which none of these waits."""
        self.ready = [operation for operation in self.ready if is_kept(operation)]
        self._ids = [operation.agent_id for operation in self.ready]
        behind = {op: followers for op, followers in self._behind.items() if is_kept(op)}
        self._behind = behind
        waiting = {follower for followers in behind.values() for follower in followers}
        self._count = len(self.ready) + len(waiting)

    def remove(self, operation: OperationT) -> None:
        """An operation that was ready has completed."""
        self._count -= 1
        place = bisect_left(self._ids, operation.agent_id)
        del self.ready[place], self._ids[place]
        for follower in self._behind.pop(operation, ()):
            follower.after.remove(operation)
            if not follower.after:
                place = bisect_left(self._ids, follower.agent_id)
                self.ready.insert(place, follower)
                self._ids.insert(place, follower.agent_id)
