"""Budgets and barriers of the dealt Hopper decode of few heads, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashdsa.kernels.attention.sm90.decode.few_heads.plan import (
    FewHeadsPlan,
)
from flashdsa.kernels.attention.sm90.decode.key_rows.plan import DealtKeyRowsPlan
from flashdsa.plan import SmemRegion


@dataclass(frozen=True)
class DealtFewHeadsPlan(DealtKeyRowsPlan, FewHeadsPlan):
    """One compiled dealt kernel; fields as of the kernel by clusters."""

    @property
    def gather_registers(self) -> int:
        """Registers of a thread that gathers."""
        return max(super().gather_registers, 40)

    @property
    def math_registers(self) -> int:
        """Registers of a thread that multiplies."""
        return min(super().math_registers, 232)

    @property
    def halves(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Regions, and offsets in them, where each consumer gets the other one's part of its dims:
        neither is read any more, and keys of the next stretch may come meanwhile."""
        return ("q", 0), ("p", 0)

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        q, *others = super().buffers
        size, chunks = self.tile.chunks * self.operand_bytes, self.tile.chunks
        does = f"Q of the item, {chunks} x [heads, 64] SW128; then half of O"
        return [replace(q, bytes=size, holds=does), *others]
