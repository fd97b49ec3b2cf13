"""Budgets and barriers of the dealt Hopper decode of many heads, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from flashdsa.kernels.attention.sm90.decode.many_heads.plan import ManyHeadsPlan
from flashdsa.kernels.attention.sm90.decode.shared.plan import OF_CLUSTERS
from flashdsa.plan import Barrier, SmemRegion


@dataclass(frozen=True)
class DealtManyHeadsPlan(ManyHeadsPlan):
    """One compiled dealt kernel; fields as of the kernel of CTAs alone."""

    @property
    def name(self) -> str:
        """Exported name of its function."""
        return super().name.replace("_heads", "_dealt_heads")

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        does = "rows of 32 keys a stage"
        return [replace(one, holds=does) if one.name == "k" else one for one in super().buffers]

    @property
    def cluster_buffers(self) -> list[SmemRegion]:
        """Shared memory regions of cuts and tickets."""
        return self.dealt_buffers

    @property
    @cache  # noqa: B019 - plans are few
    def barriers(self) -> tuple[Barrier, ...]:
        """The mbarriers, in order.

        Barriers of pieces are a ring, those of P complete a phase for each step, those of parts one
        for each part, each other one a phase for each stretch.
        """
        return (
            *(barrier for barrier in super().barriers if barrier.name not in OF_CLUSTERS),
            *self.dealt_barriers,
        )
