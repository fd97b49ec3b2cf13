"""Whether memory that nobody wrote reached a launch's results: the launch again, with other bytes.

A read of such memory may be harmless: a vector covers padding, a lane drops what it got, a struct
is copied with its padding. What else differs after two runs that differ in nothing else depends on
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import ExecutionError
from ptxemu.events import Observer
from ptxemu.global_writes import Writes
from ptxemu.memory.global_memory import Allocation, GlobalMemory

MOST_BYTES = 1 << 26
"""Bytes of global memory up to which a launch is run again: they are copied before each."""
OTHER_BYTE = 0xFF
"""Global memory that nobody wrote holds it in the second run, and zeros in the first."""
Ranges = list[tuple[int, int]]


class Before:
    """Global memory before a launch, to run it again."""

    def __init__(self, memory: GlobalMemory) -> None:
        self._memory = memory
        self._blank = sorted(memory.blank)
        self._count = len(memory.allocations)
        self._known = [
            (allocation, *one)
            for allocation in memory.allocations
            if allocation.may_be_written
            for one in _outside(allocation.base, allocation.end, self._blank)
        ]
        self._data = [_bytes(*place).copy() for place in self._known]

    @staticmethod
    def of(memory: GlobalMemory) -> Before | None:
        """None where memory is large, or where it is not known what the launch may write."""
        blank = sum(end - begin for begin, end in memory.blank)
        held = sum(len(a.data) for a in memory.allocations if a.may_be_written)
        if memory.allow_unregistered or held - blank > MOST_BYTES:
            return None
        return Before(memory)

    def reached(self, run: Callable[[Observer], object]) -> str:
        """Name where the results of `run`, the launch again, are others; empty if nowhere.

        Memory is then as the first run left it. What allocates gets other addresses each time.
        """
        if len(self._memory.allocations) != self._count:
            return ""
        still_blank = sorted(self._memory.blank_now())
        new = [
            (allocation, *one)
            for begin, end in self._blank
            for one in _outside(begin, end, still_blank)
            if (allocation := self._memory.find(one[0])) is not None
        ]
        if sum(end - begin for _, begin, end in new) > MOST_BYTES:
            return ""
        places, writes = self._known + new, Writes()
        after = [_bytes(*place).copy() for place in places]
        for place, data in zip(self._known, self._data, strict=True):
            _bytes(*place)[:] = data
        for place in new:
            _bytes(*place)[:] = OTHER_BYTE
        try:
            run(writes)
            for number, (place, first) in enumerate(zip(places, after, strict=True)):
                second, within = _bytes(*place), place[1:]
                differs = first != second
                if number >= len(self._known):
                    differs = np.where(writes.owners(*within) != 0, differs, first != 0)
                if differs.any():
                    differs &= ~_padding(first, second, writes, *within)
                if differs.any():
                    at = place[1] - place[0].base + int(np.argmax(differs))
                    return f"{place[0].name} at byte {at}"
        except ExecutionError as error:
            return f"whether the launch ends ({error})"
        finally:
            for place, data in zip(places, after, strict=True):
                _bytes(*place)[:] = data
        return ""


def _padding(
    first: NDArray[np.uint8], second: NDArray[np.uint8], writes: Writes, begin: int, end: int
) -> NDArray[np.bool_]:
    """Bytes that nobody wrote and that a thread copied beside others of an object, as a struct's
    padding is: whole words, or what is behind a word's first byte (a byte that is widened comes
    first)."""
    around = begin % 4, -end % 4
    changed = np.pad(first ^ second, around).reshape(-1, 4)
    copied = (changed == OTHER_BYTE) & np.isin(np.pad(first, around), (0, 0xFF)).reshape(-1, 4)
    is_copy = (copied | (changed == 0)).all(1) & (copied.all(1) | (changed[:, 0] == 0))
    is_copied = (copied & is_copy[:, None]).reshape(-1)[around[0] :][: end - begin]
    owners = writes.owners(begin, end)
    parts = np.flatnonzero(np.diff(owners, prepend=-2))
    is_known = np.logical_or.reduceat(first == second, parts) & (owners[parts] > 0)
    padding: NDArray[np.bool_] = is_copied & np.repeat(is_known, np.diff(parts, append=end - begin))
    return padding


def _bytes(allocation: Allocation, begin: int, end: int) -> NDArray[np.uint8]:
    return allocation.data[begin - allocation.base : end - allocation.base]


def _outside(begin: int, end: int, ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The parts of [begin, end) that no range, of sorted ones, covers."""
    parts: Ranges = []
    for first, last in ranges:
        if first < end and last > begin:
            if first > begin:
                parts.append((begin, first))
            begin = max(begin, last)
    return [*parts, (begin, end)] if begin < end else parts
