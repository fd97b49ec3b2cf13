"""Budgets and barriers of the stream-K Hopper decode of few heads, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from flashdsa.kernels.attention.sm90.decode.few_heads.plan import FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.shared.plan import OF_CLUSTERS
from flashdsa.plan import Arrives, Barrier, SmemRegion


@dataclass(frozen=True)
class StreamKFewHeadsPlan(FewHeadsPlan):
    """One compiled stream-K kernel; fields as of the kernel by clusters."""

    @property
    def name(self) -> str:
        return super().name.replace("_heads", "_stream_k_heads")

    @property
    def cluster_buffers(self) -> list[SmemRegion]:
        """Shared memory regions of cuts, tickets and stretches."""
        return self.stream_k_buffers

    @property
    def gather_registers(self) -> int:
        return max(super().gather_registers, 40)

    @property
    def math_registers(self) -> int:
        return min(super().math_registers, 232)

    @property
    def halves(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Regions, and offsets in them, where each consumer gets the other one's part of its dims:
        neither is read any more, and keys of the next stretch may come meanwhile."""
        return ("q", 0), ("p", 0)

    @property
    def buffers(self) -> list[SmemRegion]:
        q, *others = super().buffers
        size, chunks = self.tile.chunks * self.operand_bytes, self.tile.chunks
        does = f"Q of the item, {chunks} x [heads, 64] SW128; then half of O"
        return [replace(q, bytes=size, holds=does), *others]

    @cached_property
    def barriers(self) -> tuple[Barrier, ...]:
        """Those of pieces are a ring, those of parts complete a phase for each part, each other one
        a phase for each stretch."""
        gather, math = self.roles
        one, every, warps = Arrives.ONE_THREAD, Arrives.EVERY_THREAD, Arrives.EVERY_WARP
        return (
            *(barrier for barrier in super().barriers if barrier.name not in OF_CLUSTERS),
            Barrier("stretch_full", 1, gather, one, math, 0, "the stretch is stored"),
            Barrier("extent_free", 1, math, warps, gather, 0, "the number of steps has been read"),
            Barrier("stretch_read", 1, math, every, math, 0,
                    "both consumers have read what ends the stretch"),
            Barrier("part_stored", 1, math, every, math, 0, "the part is in its slot"),
            Barrier("ticket_full", 1, math, one, math, 0, "the part's ticket is drawn"),
        )  # fmt: skip
