"""cp.async: copies of 4, 8 or 16 bytes a thread from global to shared memory, done later.

They belong to the generic proxy; what they wrote is known to the thread that waits for them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu.engines.groups import copy_groups
from ptxemu.engines.mbarrier import mbarriers
from ptxemu.errors import ExecutionError, fault
from ptxemu.events import AccessKind, Space
from ptxemu.machine.lanes import Mask
from ptxemu.machine.regions import report
from ptxemu.machine.state import NO_ORDER, AsyncOperation, Cta, Ordering, Warp
from ptxemu.memory.address import SHARED_BASE, SHARED_OFFSET_MASK, SHARED_RANK_SHIFT
from ptxemu.syntax.ast import Instruction

Addresses: TypeAlias = NDArray[np.int64]

_UNITS: dict[int, np.dtype[np.generic]] = {
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
}
"""Types that NumPy moves at once, by bytes: a complex number is 16 bytes."""


@dataclass(slots=True, eq=False)
class LaneCopies:
    """Copies of the lanes of one instruction.

    Attributes:
        offsets: in the CTA's shared memory; sources: global addresses; counts: bytes to read of
            each, the rest is zero; None: all.
    """

    offsets: Addresses
    sources: Addresses
    counts: Addresses | None


class ThreadCopies(AsyncOperation):
    """The copies of one instruction: one of `size` bytes a lane."""

    def __init__(self, warp: Warp, instruction: Instruction, copies: LaneCopies, size: int) -> None:
        super().__init__("cp.async", warp, instruction)
        self._copies = copies
        self._size = size
        self.steps.append(self._copy)

    def _copy(self) -> None:
        try:
            data = self._read()
        except ExecutionError as error:
            raise ExecutionError(f"{self.instruction.span}: {self.label}: {error}") from None
        unit = _UNITS[self._size]
        shared = self.cta.shared
        whole = len(shared) // self._size * self._size
        offsets = self._copies.offsets
        shared[:whole].view(unit)[offsets // self._size] = data.view(unit)[:, 0]
        self._report(Space.SHARED, offsets, self._size, AccessKind.WRITE)

    def _read(self) -> NDArray[np.uint8]:
        memory = self.cta.machine.memory
        sources, counts = self._copies.sources, self._copies.counts
        if counts is None:
            data = memory.load(sources, self._size)
        else:
            data = np.zeros((len(sources), self._size), dtype=np.uint8)
            for count in _distinct(counts):
                chosen = counts == count
                data[chosen, :count] = memory.load(sources[chosen], count)
        self._report_read()
        return data

    def _report_read(self) -> None:
        sources, counts = self._copies.sources, self._copies.counts
        if counts is None:
            self._report(Space.GLOBAL, sources, self._size, AccessKind.READ)
            return
        for count in _distinct(counts):
            chosen = sources[counts == count]
            self._report(Space.GLOBAL, chosen, count, AccessKind.READ)

    def _report(self, space: Space, starts: Addresses, size: int, kind: AccessKind) -> None:
        machine = self.cta.machine
        if machine.observer is not None:
            owner = self.cta if space is Space.SHARED else None
            report(machine, self, space, owner, _once(starts), size, kind, self.instruction)


def _distinct(counts: Addresses) -> list[int]:
    """The numbers of bytes that are read, none left out, the smallest first."""
    return sorted(set(counts.tolist()) - {0})


def _once(starts: Addresses) -> Addresses:
    """Each start once."""
    listed = starts.tolist()
    return starts if len(set(listed)) == len(listed) else np.unique(starts)


def checked_copies(
    cta: Cta,
    targets: Addresses,
    sources: Addresses,
    counts: Addresses | None,
    size: int,
    instruction: Instruction,
) -> LaneCopies:
    """Return the lanes' copies to shared addresses.

    Raises:
        ExecutionError: an address or a count is wrong.
    """
    offsets = _offsets(cta, targets, size, instruction)
    _check_sources(sources, counts, size, instruction)
    return LaneCopies(offsets, sources, counts)


def _offsets(cta: Cta, addresses: Addresses, size: int, instruction: Instruction) -> Addresses:
    offsets = addresses & SHARED_OFFSET_MASK
    if ((addresses >> SHARED_RANK_SHIFT) != cta.rank).any():
        fault(instruction, "a destination that is not in the executing CTA's shared memory")
    if (offsets % size).any():
        wrong = int(offsets[offsets % size != 0][0])
        fault(instruction, f"shared address 0x{wrong:x} is not aligned to {size} bytes")
    if int(offsets.max()) + size > len(cta.shared) or int(offsets.min()) < SHARED_BASE:
        fault(
            instruction,
            f"shared addresses 0x{int(offsets.min()):x} to 0x{int(offsets.max()) + size:x}: the "
            f"CTA's shared memory is 0x{SHARED_BASE:x} to 0x{len(cta.shared):x}",
        )
    return offsets


def _check_sources(
    sources: Addresses, counts: Addresses | None, size: int, instruction: Instruction
) -> None:
    if counts is not None and ((counts > size) | (counts < 0)).any():
        fault(instruction, f"src-size {int(counts.max())} is more than cp-size {size}")
    if (sources % size).any():
        wrong = int(sources[sources % size != 0][0])
        fault(instruction, f"global address 0x{wrong:x} is not aligned to {size} bytes")


def issue_arrival(
    warp: Warp, instruction: Instruction, lanes: Mask, addresses: Addresses, *, counted: bool
) -> None:
    """cp.async.mbarrier.arrive: each thread arrives when all its cp.async have completed.

    Args:
        addresses: shared address of each thread's mbarrier.
        counted: .noinc: the barrier's count has these arrivals already; else the current phase
            waits for one more a thread.
    """
    barriers = mbarriers(warp.cta)
    arrivals = sorted(Counter((addresses & SHARED_OFFSET_MASK).tolist()).items())
    if not counted:
        for offset, count in arrivals:
            barriers.add_pending(offset, count)
    groups = copy_groups(warp)
    before = [member.operation for member in groups.prior(lanes)]
    operation = AsyncOperation(
        "cp.async.mbarrier.arrive", warp, instruction, ordering=Ordering(before)
    )

    def arrive() -> None:
        for offset, count in arrivals:
            barriers.arrive(operation, offset, count)

    operation.steps.append(arrive)
    warp.cta.machine.issue(operation)
    operation.ordering = NO_ORDER  # else every arrival would keep all those before it
    # Whoever waits for this operation has waited for those before it.
    groups.forget_open(lanes)
    groups.add(operation, lanes)
