"""Addresses in global memory that a launch writes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptxemu.events import Access, AccessKind, Observer, Proxy, Space


class Writes(Observer):
    """Addresses in global memory that are written."""

    def __init__(self) -> None:
        self._pieces: list[tuple[NDArray[np.int64], int, int]] = []
        """Starts, bytes of each, and the number of the first one's object; 0: of none."""
        self._objects: dict[int, _Objects] = {}
        """The last ones of each warp."""
        self._count = 1
        self._words: NDArray[np.int64] | None = None

    def accessed(self, access: Access) -> None:
        """Keep the addresses."""
        if access.space is Space.GLOBAL and access.kind is not AccessKind.READ:
            self._pieces.append((access.starts, access.size, self._object(access)))

    def _object(self, access: Access) -> int:
        """Number what lanes store in a row, each at the same distances and no instruction twice, as
        they copy structs."""
        if access.kind is not AccessKind.WRITE or access.proxy is not Proxy.GENERIC:
            return 0
        last, pc = self._objects.get(access.agent.agent_id), access.instruction.pc
        if last is not None and len(last.starts) == len(access.starts) and pc not in last.pcs:
            away = access.starts - last.starts
            if (away == away[:1]).all():
                last.pcs.add(pc)
                return last.number
        self._objects[access.agent.agent_id] = _Objects(self._count, access.starts, {pc})
        self._count += len(access.starts)
        return self._count - len(access.starts)

    def owners(self, begin: int, end: int) -> NDArray[np.int32]:
        """The object of each byte of [begin, end); 0: it was not written, -1: it is of none."""
        owners = np.zeros(end - begin, np.int32)
        for starts, size, number in self._pieces:
            at = starts[:, None] + np.arange(size) - begin
            of = number + np.arange(len(starts)) if number else np.full(len(starts), -1)
            is_inside = (at >= 0) & (at < end - begin)
            owners[at[is_inside]] = np.broadcast_to(of[:, None], at.shape)[is_inside]
        return owners

    def touched(self, access: Access) -> int | None:
        """The first address of an access in a word of 4 bytes that was written."""
        if self._words is None:
            pieces = [_words(starts, size) for starts, size, _ in self._pieces]
            self._words = np.unique(np.concatenate(pieces)) if pieces else np.zeros(0, np.int64)
        words = _words(access.starts, access.size)
        found = words[np.isin(words, self._words)]
        return int(found[0]) * 4 if len(found) else None


class _Objects(NamedTuple):
    """Values that lanes of a warp store, each to an object of its own."""

    number: int
    """The first lane's; the others' follow."""
    starts: NDArray[np.int64]
    pcs: set[int]


class Earlier(NamedTuple):
    """A launch that lets the next one begin before its end, and what it writes."""

    kernel: str
    writes: Writes


def _words(starts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    last = (starts + size - 1) // 4
    first = starts // 4
    return np.unique((first[:, None] + np.arange(int((last - first).max()) + 1)).reshape(-1))
