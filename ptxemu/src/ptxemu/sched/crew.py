"""The processes among which a launch's clusters are dealt, where nothing ties them together.

Every process goes on from the same moment with a share of the clusters. What a forked one writes to
memory that it does not share with the first is sent there at its end.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import ExecutionError
from ptxemu.machine.independence import tie_between_clusters
from ptxemu.machine.state import Machine
from ptxemu.memory.global_memory import Allocation

STEPS_BEFORE = 8192
"""Steps of a launch before its clusters are dealt: some 0.2 s, ten times what that costs."""
_SECONDS_BETWEEN_LOOKS = 0.2
"""While a process waits for the others' shares."""
MOST_BYTES = 1 << 30
"""Most bytes of memory that are copied to find what a process has written."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Bytes of an allocation that a process wrote: runs of `sizes` bytes from `starts` on."""

    allocation: int
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    data: bytes


@dataclass(frozen=True, slots=True)
class _Report:
    """Results of a process."""

    error: Exception | None
    warp_instructions: int
    async_operations: int
    changes: list[_Change]


class Crew:
    """The processes of one launch, from the point of view of one of them."""

    def __init__(self, machine: Machine, most: int) -> None:
        """`most`: processes, this one included."""
        self._machine = machine
        self._most = most if most > 1 and _can_be_dealt(machine) else 1
        self._pipes: list[tuple[int, int]] = []
        """Other processes, in the first process: the id and the pipe of the report of each."""
        self._out: int | None = None
        """Pipe for the report, in the other processes."""
        self._number = 0
        self._counts: NDArray[np.int64] | None = None
        """Clusters finished and instructions executed since clusters were dealt, by process; all of
        them see it."""
        self._before = (0, 0)
        self._watched: list[tuple[int, Allocation, NDArray[np.uint8]]] = []

    @property
    def can_deal(self) -> bool:
        """Whether `deal` may make processes."""
        return self._most > 1 and self._counts is None

    @property
    def is_first(self) -> bool:
        """Whether this is the process of the caller."""
        return self._out is None

    def deal(self, clusters: int, finished: int) -> tuple[int, int]:
        """Make up to one process a cluster; returns this one's number, and how many there are."""
        count = min(self._most, clusters)
        if count < 2:
            self._most = 1
            return 0, 1
        machine = self._machine
        self._before = finished, machine.warp_instructions
        shared = mmap.mmap(-1, 16 * count)
        self._counts = np.frombuffer(shared, dtype=np.int64).reshape(count, 2)
        for number in range(1, count):
            source, sink = os.pipe()
            with warnings.catch_warnings():  # Python 3.12 warns of other threads: none is needed
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if process == 0:
                os.close(source)
                self._become(number, sink)
                return number, count
            os.close(sink)
            self._pipes.append((process, source))
        return 0, count

    def totals(self, finished: int, instructions: int) -> tuple[int, int]:
        """Clusters finished and instructions executed by all, given this process's numbers."""
        if self._counts is None:
            return finished, instructions
        before = np.array(self._before)
        self._counts[self._number] = (finished, instructions) - before
        done, executed = (before + self._counts.sum(axis=0)).tolist()
        return done, executed

    def finish(self, while_waiting: Callable[[], None]) -> int:
        """This process's share is done: take over what the others did, or hand it over and end.

        Args:
            while_waiting: called now and then; what it raises ends the wait.

        Returns:
            clusters that others have finished.

        Raises:
            ExecutionError: what another one ran into.
        """
        if not self.is_first:
            self._hand_over(None)
        errors: list[Exception] = []
        while self._pipes:
            process, source = self._pipes[0]
            while not select.select([source], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
                while_waiting()
            with open(source, "rb") as stream:
                data = stream.read()
            del self._pipes[0]
            _, status = os.waitpid(process, 0)
            if not data:
                code = os.waitstatus_to_exitcode(status)
                errors.append(ExecutionError(f"a process of the launch ended with code {code}"))
                continue
            report: _Report = pickle.loads(data)
            self._take_over(report)
            if report.error is not None:
                errors.append(report.error)
        if errors:
            raise errors[0]
        counts, self._counts, self._most = self._counts, None, 1
        return 0 if counts is None else int(counts[1:, 0].sum())

    def give_up(self, error: BaseException) -> None:
        """This process cannot go on: tell the first one and end, or end the others."""
        if not self.is_first:
            self._hand_over(error)
        for process, source in self._pipes:
            os.kill(process, signal.SIGKILL)
            with suppress(OSError):  # it may have been closed behind a report that broke off
                os.close(source)
            os.waitpid(process, 0)
        self._pipes.clear()

    def _become(self, number: int, sink: int) -> None:
        """This is a process that was just forked."""
        for _, source in self._pipes:
            os.close(source)
        self._pipes.clear()
        self._number, self._out = number, sink
        self._machine.async_operations = 0
        self._watched = [
            (index, allocation, allocation.data.copy())
            for index, allocation in enumerate(self._machine.memory.allocations)
            if _is_private(allocation)
        ]

    def _hand_over(self, error: BaseException | None) -> NoReturn:
        """Send the report and end, without what the first process's exit is to do."""
        assert self._out is not None
        code = 1
        try:
            report = _Report(
                _as_sent(error),
                self._machine.warp_instructions - self._before[1],
                self._machine.async_operations,
                [change for watched in self._watched for change in _changes(*watched)],
            )
            with open(self._out, "wb") as stream:
                stream.write(pickle.dumps(report, protocol=5))
            code = 0
        finally:
            os._exit(code)

    def _take_over(self, report: _Report) -> None:
        self._machine.warp_instructions += report.warp_instructions
        self._machine.async_operations += report.async_operations
        for change in report.changes:
            data = self._machine.memory.allocations[change.allocation].data
            before = np.cumsum(change.sizes) - change.sizes
            offsets = np.repeat(change.starts - before, change.sizes)
            data[offsets + np.arange(len(change.data))] = np.frombuffer(change.data, np.uint8)


def _can_be_dealt(machine: Machine) -> bool:
    if machine.observer is not None or machine.memory.allow_unregistered:
        return False
    if not hasattr(os, "fork") or tie_between_clusters(machine.program.function) is not None:
        return False
    private = [a for a in machine.memory.allocations if _is_private(a)]
    return sum(len(a.data) for a in private) <= MOST_BYTES


def _is_private(allocation: Allocation) -> bool:
    return allocation.data.flags.writeable and allocation.writable and not allocation.is_shared


def _changes(index: int, allocation: Allocation, before: NDArray[np.uint8]) -> list[_Change]:
    """Return the differences from `before`: nothing, or one change."""
    is_new = allocation.data != before
    edges = np.flatnonzero(np.diff(is_new, prepend=False, append=False))
    if not len(edges):
        return []
    starts, ends = edges[::2], edges[1::2]
    return [_Change(index, starts, ends - starts, allocation.data[is_new].tobytes())]


def _as_sent(error: BaseException | None) -> Exception | None:
    """An error as another process can raise it."""
    if error is None:
        return None
    with suppress(Exception):
        pickle.loads(pickle.dumps(error))
        if isinstance(error, Exception):
            return error
    return ExecutionError(f"{type(error).__name__}: {error}")
