"""Addresses in global memory that a launch writes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptxemu.events import Access, AccessKind, Observer, Space


class Writes(Observer):
    """Addresses in global memory that are written."""

    def __init__(self) -> None:
        self._pieces: list[tuple[NDArray[np.int64], int, bool]] = []
        """Starts, bytes of each, and whether a vector of bytes was stored."""
        self._words: NDArray[np.int64] | None = None

    def accessed(self, access: Access) -> None:
        """Keep the addresses."""
        if access.space is Space.GLOBAL and access.kind is not AccessKind.READ:
            of_bytes = access.size > 1 and access.instruction.modifiers[-1] in ("b8", "u8", "s8")
            self._pieces.append((access.starts, access.size, of_bytes))

    def inside(
        self, begin: int, end: int, *, least: int = 1, of_bytes: bool = False
    ) -> NDArray[np.bool_]:
        """Which bytes of [begin, end) were written, if by that many at least or byte vectors."""
        written = np.zeros(end - begin, np.bool_)
        for starts, size, is_of_bytes in self._pieces:
            if size < least or is_of_bytes < of_bytes:
                continue
            at = (starts[:, None] + np.arange(size) - begin).reshape(-1)
            written[at[(at >= 0) & (at < end - begin)]] = True
        return written

    def touched(self, access: Access) -> int | None:
        """The first address of an access in a word of 4 bytes that was written."""
        if self._words is None:
            pieces = [_words(starts, size) for starts, size, _ in self._pieces]
            self._words = np.unique(np.concatenate(pieces)) if pieces else np.zeros(0, np.int64)
        words = _words(access.starts, access.size)
        found = words[np.isin(words, self._words)]
        return int(found[0]) * 4 if len(found) else None


class Earlier(NamedTuple):
    """A launch that lets the next one begin before its end, and what it writes."""

    kernel: str
    writes: Writes


def _words(starts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    last = (starts + size - 1) // 4
    first = starts // 4
    return np.unique((first[:, None] + np.arange(int((last - first).max()) + 1)).reshape(-1))
