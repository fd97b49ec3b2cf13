"""Asynchronous copies of threads (PTX ISA, "Data Movement and Conversion Instructions: Asynchronous
copy": cp.async, cp.async.commit_group, cp.async.wait_group and wait_all; and
"cp.async.mbarrier.arrive")."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu.engines.groups import copy_groups
from ptxemu.engines.mbarrier import mbarriers
from ptxemu.errors import ExecutionError, fault
from ptxemu.events import AccessKind
from ptxemu.isa.copy_operands import wait
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_group import Blocked
from ptxemu.machine.lanes import Mask
from ptxemu.machine.operands import LaneReader, address_reader, reader
from ptxemu.machine.regions import report
from ptxemu.machine.state import NO_ORDER, AsyncOperation, Cta, Ordering, Warp
from ptxemu.memory.address import SHARED_BASE, SHARED_OFFSET_MASK, SHARED_RANK_SHIFT
from ptxemu.syntax.ast import Instruction, IntImmediate, NegatedRegister, Operand, Register

# cp.async: copies of 4, 8 or 16 bytes a thread from global to shared memory, done later.
#
# They belong to the generic proxy; what they wrote is known to the thread that waits for them.

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
        self._report(self.cta, offsets, self._size, AccessKind.WRITE)

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
            self._report(None, sources, self._size, AccessKind.READ)
            return
        for count in _distinct(counts):
            chosen = sources[counts == count]
            self._report(None, chosen, count, AccessKind.READ)

    def _report(self, owner: Cta | None, starts: Addresses, size: int, kind: AccessKind) -> None:
        if self.cta.machine.observer is not None:
            report(self, owner, _once(starts), size, kind)


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


@visible("cp.async")
def copy(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[dst] = [src] for cp-size bytes; those beyond src-size, or all with ignore-src, are zero."""
    has_policy = modifiers.flag("L2::cache_hint")
    cache = modifiers.one_of("ca", "cg")
    modifiers.drop_hints()
    modifiers.one_of("shared", "shared::cta")
    modifiers.one_of("global")
    target, source, size_operand, *rest = instruction.operands
    size = _constant(instruction, size_operand)
    if size not in (4, 8, 16) or (cache == "cg" and size != 16):
        unsupported(instruction, f"cp-size {size} with .{cache}")
    if len(rest) - has_policy not in (0, 1):
        unsupported(instruction, "too many operands")
    limit = rest[0] if len(rest) > has_policy else None
    read_target, read_source = address_reader(target), address_reader(source)
    read_counts = None if limit is None else _counts(limit, size)

    def step(warp: Warp, mask: Mask) -> None:
        counts = None if read_counts is None else read_counts(warp)[mask]
        targets, sources = read_target(warp)[mask], read_source(warp)[mask]
        copies = checked_copies(warp.cta, targets, sources, counts, size, instruction)
        operation = ThreadCopies(warp, instruction, copies, size)
        warp.cta.machine.issue(operation)
        copy_groups(warp).add(operation, mask)

    return step


def _counts(limit: Operand, size: int) -> LaneReader:
    """Bytes that each lane reads, from src-size or the predicate ignore-src."""
    is_predicate = isinstance(limit, NegatedRegister) or (
        isinstance(limit, Register) and limit.type == "pred"
    )
    if is_predicate:
        ignored = reader(limit, "pred")
        return lambda warp: np.where(ignored(warp), 0, size)
    read = reader(limit, "u32")
    return lambda warp: read(warp).astype(np.int64)


def _constant(instruction: Instruction, operand: Operand) -> int:
    if not isinstance(operand, IntImmediate):
        unsupported(instruction, f"operand {operand} must be a constant")
    return operand.value


@visible("cp.async.commit_group")
def commit_group(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Make a group of what the thread has issued since its last commit."""

    def step(warp: Warp, mask: Mask) -> None:
        copy_groups(warp).commit(mask)

    return step


@visible("cp.async.wait_group")
def wait_group(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Wait until at most the n latest groups of the thread are incomplete."""
    pending = _constant(instruction, instruction.operands[0])

    def step(warp: Warp, mask: Mask) -> Blocked | None:
        groups = copy_groups(warp)
        return wait(warp, groups, groups.due(mask, pending), mask)

    return step


@visible("cp.async.wait_all")
def wait_all(instruction: Instruction, modifiers: Modifiers) -> Step:
    """commit_group, then wait_group 0."""

    def step(warp: Warp, mask: Mask) -> Blocked | None:
        groups = copy_groups(warp)
        groups.commit(mask)
        return wait(warp, groups, groups.due(mask, 0), mask)

    return step


@visible("cp.async.mbarrier.arrive")
def arrive(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Arrive on the mbarrier when the thread's prior cp.async have completed.

    Without .noinc the current phase waits for one arrival more, so that the count stays balanced.
    """
    counted = modifiers.flag("noinc")
    modifiers.one_of("shared", "shared::cta", default="shared::cta")
    modifiers.one_of("b64")
    read = address_reader(instruction.operands[0])

    def step(warp: Warp, mask: Mask) -> None:
        addresses = read(warp)[mask]
        if ((addresses & 0xFFFF_FFFF) >> 24 != warp.cta.rank).any():
            fault(instruction, "the mbarrier is not in the executing CTA's shared memory")
        issue_arrival(warp, instruction, mask, addresses, counted=counted)

    return step
