"""Accesses to TMEM: permission and reports, shared by ld, st, mma, cp and shift."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.engines.tmem_allocator import tmem_allocator
from ptxemu.events import AccessKind, Proxy, Space
from ptxemu.machine.regions import report
from ptxemu.machine.state import AsyncOperation, Cta
from ptxemu.memory.tmem import LANE_BYTES


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
