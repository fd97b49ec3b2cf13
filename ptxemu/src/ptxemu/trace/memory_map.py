"""Writes and reads of bytes of shared memory and columns of TMEM: when, and by whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu.events import Access, AccessKind, Observer, Space
from ptxemu.machine.regions import TMEM_LANE_BYTES
from ptxemu.trace.classes import Roles, role_of, unit_of
from ptxemu.trace.recorder import Recorder

MAX_ACCESSES = 1_000_000
"""Recording stops there, with `MemoryMap.truncated` set."""

DEALLOC = ("tcgen05", "dealloc")
"""It is reported as a write of its columns, so that the check orders it; no bytes move."""

Writer: TypeAlias = int | str
"""A warp's number in its CTA, or the unit that an asynchronous operation ran on."""
Memory: TypeAlias = tuple[Space, int]
"""SHARED or TMEM, and the CTA's number."""
Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""[first, end) bytes of shared memory or columns of TMEM."""


@dataclass(frozen=True, slots=True)
class Touch:
    """One access to one memory."""

    time: float
    who: Writer
    is_write: bool
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Raster:
    """The picture of one memory: rows are addresses, columns are time.

    `writers[row, column]` is the number of the last writer plus one, 0 where nobody has written;
    `is_live` tells whether somebody still reads what stands there; `is_read` when.
    """

    memory: Memory
    first: int
    """Address of the first row."""
    per_row: int
    """Bytes or columns a row."""
    end_time: float
    names: list[Writer]
    writers: NDArray[np.int16]
    is_live: NDArray[np.bool_]
    is_read: NDArray[np.bool_]


class MemoryMap(Observer):
    """Listens to a run and keeps who wrote and read SMEM and TMEM."""

    def __init__(self, recorder: Recorder, *, max_accesses: int = MAX_ACCESSES) -> None:
        """`recorder`: it hears of every event first, and tells the time."""
        self._now = recorder.clock.now
        self.ctas = recorder.ctas
        self.touches: dict[Memory, list[Touch]] = {}
        self.truncated = False
        self._left = max_accesses

    def accessed(self, access: Access) -> None:
        """Keep accesses to shared memory and TMEM."""
        agent: Any = access.agent
        is_operation = hasattr(agent, "issuer")
        if access.owner is None or access.space not in (Space.SHARED, Space.TMEM):
            return
        if access.instruction.modifiers[:2] == DEALLOC:
            return
        if self._left <= 0:
            self.truncated = True
            return
        self._left -= 1
        touch = Touch(
            self._now(agent),
            unit_of(agent) if is_operation else agent.index,
            access.kind is not AccessKind.READ,
            ranges_of(access),
        )
        self.touches.setdefault((access.space, access.owner), []).append(touch)

    @property
    def end_time(self) -> float:
        """Time of the last access to any memory; at least 1."""
        return max([1.0, *(t.time for touches in self.touches.values() for t in touches)])

    def raster(self, memory: Memory, *, rows: int = 240, columns: int = 900) -> Raster:
        """The picture of one memory that was touched, from time 0 to `end_time`.

        Args:
            rows: at most so many; columns: so many.
        """
        touches = sorted(self.touches[memory], key=lambda t: t.time)
        granule = 16 if memory[0] is Space.SHARED else 1
        first = min(start for t in touches for start, _ in t.ranges) // granule * granule
        last = max(end for t in touches for _, end in t.ranges)
        per_row = -(-(last - first) // rows)
        per_row = -(-per_row // granule) * granule
        height = -(-(last - first) // per_row)
        names = sorted(
            {t.who for t in touches if t.is_write}, key=lambda w: (isinstance(w, str), w)
        )
        numbers = {name: number for number, name in enumerate(names, start=1)}
        end_time = self.end_time
        writers = np.zeros((height, columns), dtype=np.int16)
        begins = np.zeros((height, columns), dtype=np.bool_)
        is_read = np.zeros((height, columns), dtype=np.bool_)
        reads_older = np.zeros((height, columns), dtype=np.bool_)
        for touch in touches:
            column = min(int(touch.time / end_time * columns), columns - 1)
            for start, end in touch.ranges:
                place = slice((start - first) // per_row, -(-(end - first) // per_row))
                if touch.is_write:
                    writers[place, column:] = numbers[touch.who]
                    begins[place, column] = True
                else:
                    is_read[place, column] = True
                    reads_older[place, column] |= ~begins[place, column]
        return Raster(
            memory,
            first,
            per_row,
            end_time,
            names,
            writers,
            _live(begins, is_read, reads_older),
            is_read,
        )


def _live(
    begins: NDArray[np.bool_], is_read: NDArray[np.bool_], reads_older: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Cells from a write up to the last read before the next write; and the write's own cell.

    Args:
        begins: somebody writes in this cell; is_read: somebody reads.
        reads_older: somebody reads before the cell's first write.
    """
    live = np.zeros_like(begins)
    awaited = np.zeros(len(begins), dtype=np.bool_)
    for column in range(begins.shape[1] - 1, -1, -1):
        awaited |= is_read[:, column]
        live[:, column] = awaited | begins[:, column]
        awaited = (awaited & ~begins[:, column]) | reads_older[:, column]
    return live


def ranges_of(access: Access) -> Ranges:
    """The pieces of an access, merged: bytes of shared memory, or columns of TMEM."""
    starts, size = access.starts, access.size
    if access.space is Space.TMEM:
        starts, size = starts % TMEM_LANE_BYTES // 4, max(size // 4, 1)
    starts = np.unique(starts)
    breaks = np.flatnonzero(np.diff(starts) > size)
    firsts = starts[np.concatenate(([0], breaks + 1))]
    lasts = starts[np.concatenate((breaks, [len(starts) - 1]))] + size
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))


def writer_name(writer: Writer, roles: Roles) -> str:
    """Return the writer's name for the legend."""
    return writer if isinstance(writer, str) else role_of(roles, writer)
