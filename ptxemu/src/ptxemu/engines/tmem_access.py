"""Accesses to TMEM: permission and reports, shared by ld, st, mma, cp and shift."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.engines.tmem_allocator import tmem_allocator
from ptxemu.events import AccessKind, Agent, Proxy, Space
from ptxemu.machine.regions import report
from ptxemu.machine.state import Cta
from ptxemu.memory.tmem import LANE_BYTES
from ptxemu.syntax.ast import Instruction


def access_tmem(
    cta: Cta,
    agent: Agent,
    instruction: Instruction,
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
    tmem_allocator(cta).check_access(column, columns, agent, instruction)
    machine = cta.machine
    if machine.observer is not None and len(lanes):
        starts = lanes * LANE_BYTES + column * 4
        report(machine, agent, Space.TMEM, cta, starts, columns * 4, kind, instruction, proxy=proxy)
