"""Work of the reference shape, and shorthands of the kernels' tables."""

from __future__ import annotations

from workbench.model.machine import GpuModel
from workbench.model.traffic import Matmul

QUERIES = 4096
TOPK = 2048
D_QK = 576
D_V = 512
BACKWARD_DIMS = 3 * D_QK + 2 * D_V
"""Multiply-adds of a (head, key) pair: P, dP, dQ and the two halves of dKV."""
FORWARD_DIMS = D_QK + D_V
PUBLISHED_DIM = 512
"""QK and V dims of the kernels whose authors published times on B200."""
ROW_BYTES = 2 * D_QK
GRADIENT_ROW_BYTES = 4 * D_QK


def ss(name: str, count: float, m: int, n: int, **more: object) -> Matmul:
    """MMAs with both operands in shared memory."""
    return Matmul(name, count, m, n, **more)  # type: ignore[arg-type]


def l2_cycles(machine: GpuModel, size: float) -> float:
    """Clocks in which an SM gets its share of L2's reads."""
    share = machine.l2_read.value / machine.sms.value / machine.busy_clock.value
    return size / share
