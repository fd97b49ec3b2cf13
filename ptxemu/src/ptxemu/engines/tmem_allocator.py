"""Allocation of TMEM columns: tcgen05.alloc, dealloc and relinquish_alloc_permit.

With .cta_group::2 a warp of each CTA of a pair takes part, and both CTAs get the same columns; the
pair's even CTA keeps the requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import ExecutionError, fault
from ptxemu.events import AccessKind, Agent, Proxy, Space
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.regions import report
from ptxemu.machine.state import AsyncOperation, Cta
from ptxemu.memory.tmem import COLUMNS, LANE_BYTES, split_address
from ptxemu.syntax.ast import Instruction

SECTION = 'PTX ISA, "tcgen05.alloc, tcgen05.dealloc, tcgen05.relinquish_alloc_permit"'
_MIN_COLUMNS = 32


@dataclass(slots=True)
class TmemRequest:
    """One collective allocation of a pair."""

    columns: int
    arrived: set[int] = field(default_factory=set)
    """Ranks in the pair of the CTAs whose warp takes part."""
    start: int | None = None


class TmemAllocator:
    """The columns of one CTA."""

    def __init__(self, cta: Cta) -> None:
        self._cta = cta
        self.allocations: dict[int, tuple[int, int]] = {}
        """First column to (number of columns, cta_group)."""
        self._owned = np.zeros(COLUMNS, dtype=np.bool_)
        self._ever_owned = np.zeros(COLUMNS, dtype=np.bool_)
        self._freed_by: dict[int, tuple[int, int]] = {}
        """Who freed the columns that start there last: agent and pc."""
        self._smallest = COLUMNS
        self.relinquished = False
        self._requests: list[TmemRequest] = []
        cta.exit_checks.append(self._check_exit)

    def check_count(self, columns: int, instruction: Instruction) -> None:
        """nCols must be a power of two from 32 to 512.

        Raises:
            ExecutionError: it is not.
        """
        if not _MIN_COLUMNS <= columns <= COLUMNS or columns & (columns - 1):
            fault(
                instruction,
                f"nCols must be a power of two from "
                f"{_MIN_COLUMNS} to {COLUMNS}; got {columns} ({SECTION})",
            )

    def request(
        self, columns: int, cta_group: int, agent: Agent, instruction: Instruction
    ) -> TmemRequest:
        """A warp executes tcgen05.alloc; `ready` tells when the columns are there."""
        if self.relinquished:
            message = f"{instruction.opcode} after tcgen05.relinquish_alloc_permit"
            self._complain("tmem-alloc-after-relinquish", message, agent, instruction)
        if columns > self._smallest:
            message = (
                f"{columns} columns are allocated after {self._smallest}: the number of columns "
                "must not increase between allocations"
            )
            self._complain("tmem-alloc-grows", message, agent, instruction)
        self._smallest = min(self._smallest, columns)
        rank = self._cta.rank & 1
        if cta_group == 1:
            return TmemRequest(columns, {0, 1})
        requests = tmem_allocator(_leader(self._cta))._requests
        for request in requests:
            if rank not in request.arrived and request.start is None:
                if request.columns != columns:
                    fault(
                        instruction,
                        f"the peer CTA allocates {request.columns} columns, this one {columns}",
                    )
                request.arrived.add(rank)
                self._cta.machine.progress += 1
                return request
        request = TmemRequest(columns, {rank})
        requests.append(request)
        return request

    def ready(self, request: TmemRequest, cta_group: int) -> bool:
        """Whether the request has its columns; takes them if they are free now."""
        if request.start is not None:
            return True
        if len(request.arrived) < 2:
            return False
        ctas = [self._cta] if cta_group == 1 else pair(self._cta)
        allocators = [tmem_allocator(cta) for cta in ctas]
        busy = np.any([allocator._owned for allocator in allocators], axis=0)
        for start in range(0, COLUMNS - request.columns + 1, _MIN_COLUMNS):
            if not busy[start : start + request.columns].any():
                request.start = start
                break
        if request.start is None:
            return False
        for allocator in allocators:
            allocator._own(request.start, request.columns, cta_group)
        if cta_group == 2:
            tmem_allocator(_leader(self._cta))._requests.remove(request)
        self._cta.machine.progress += 1
        return True

    def dealloc(
        self, address: int, columns: int, cta_group: int, agent: Agent, instruction: Instruction
    ) -> bool:
        """tcgen05.dealloc of this CTA's columns; False if another warp has just freed them so.

        With .cta_group::2 the instruction may block for the peer; here it does not.
        """
        lane, start = split_address(address)
        if lane or self.allocations.get(start) != (columns, cta_group):
            if self._is_the_same_again(start, agent, instruction):
                return False
            known = ", ".join(
                f"{count} columns at {first} (cta_group::{group})"
                for first, (count, group) in sorted(self.allocations.items())
            )
            message = (
                f"{instruction.opcode} of {columns} columns at 0x{address:x}, which is no "
                f"allocation; there are: {known or 'none'}"
            )
            self._complain("tmem-dealloc", message, agent, instruction)
            return True
        del self.allocations[start]
        self._owned[start : start + columns] = False
        self._freed_by[start] = (agent.agent_id, instruction.pc)
        self._cta.machine.progress += 1
        return True

    def _is_the_same_again(self, start: int, agent: Agent, instruction: Instruction) -> bool:
        """Whether another warp has just freed these columns with the same instruction.

        Kernels that ship do it at their end, where nobody else allocates: a warning.
        """
        agent_id, pc = self._freed_by.get(start, (agent.agent_id, None))
        if agent_id == agent.agent_id or pc != instruction.pc:
            return False
        message = (
            f"{instruction.opcode} of columns that another warp has freed with the same "
            "instruction: one warp should"
        )
        self._cta.machine.complain("warning", "tmem-dealloc-again", message, agent, instruction)
        return True

    def check_access(
        self, column: int, columns: int, agent: Agent, instruction: Instruction
    ) -> None:
        """Report an access to columns that are not allocated.

        Raises:
            ExecutionError: there are no such columns.
        """
        if column + columns > COLUMNS:
            fault(
                instruction,
                f"TMEM columns {column} to "
                f"{column + columns - 1} are beyond the last one, {COLUMNS - 1}",
            )
        if b"\0" not in self._owned[column : column + columns].tobytes():
            return
        where = f"TMEM columns {column} to {column + columns - 1} of cta {self._cta.ctaid}"
        if self._ever_owned[column : column + columns].all():
            message = f"{instruction.opcode} of {where} after tcgen05.dealloc"
            self._complain("tmem-deallocated", message, agent, instruction)
        else:
            message = f"{instruction.opcode} of {where}, which are not all allocated"
            self._complain("tmem-unallocated", message, agent, instruction)

    def _own(self, start: int, columns: int, cta_group: int) -> None:
        self.allocations[start] = (columns, cta_group)
        self._owned[start : start + columns] = True
        self._ever_owned[start : start + columns] = True

    def _check_exit(self) -> None:
        for start, (columns, _) in sorted(self.allocations.items()):
            message = (
                f"cta {self._cta.ctaid} exits with {columns} TMEM columns at {start} allocated: "
                "needs tcgen05.dealloc"
            )
            self._complain("tmem-leak", message, None, None)

    def _complain(
        self, code: str, message: str, agent: Agent | None, instruction: Instruction | None
    ) -> None:
        self._cta.machine.complain("error", code, message, agent, instruction)


tmem_allocator = EngineState(TmemAllocator)
"""The TMEM allocations of a CTA."""


def pair(cta: Cta) -> list[Cta]:
    """The CTA pair, the even CTA first (PTX ISA, "CTA Pair").

    Raises:
        ExecutionError: the cluster has no peer CTA.
    """
    ctas = cta.cluster.ctas
    if cta.rank ^ 1 >= len(ctas):
        raise ExecutionError(f"cta {cta.ctaid} has no peer CTA in its cluster for .cta_group::2")
    return [ctas[cta.rank & ~1], ctas[cta.rank | 1]]


def _leader(cta: Cta) -> Cta:
    return pair(cta)[0]


# Accesses to TMEM: permission and reports, shared by ld, st, mma, cp and shift.


def access_tmem(
    operation: AsyncOperation,
    cta: Cta,
    kind: AccessKind,
    lanes: NDArray[np.int64],
    column: int,
    columns: int,
    *,
    proxy: Proxy = Proxy.ASYNC,
) -> None:
    """Check that the columns are allocated and report the access of `lanes` (1-dimensional).

    Raises:
        ExecutionError: columns beyond the last one.
    """
    tmem_allocator(cta).check_access(column, columns, operation, operation.instruction)
    if cta.machine.observer is not None and len(lanes):
        starts = lanes * LANE_BYTES + column * 4
        report(operation, cta, starts, columns * 4, kind, space=Space.TMEM, proxy=proxy)
