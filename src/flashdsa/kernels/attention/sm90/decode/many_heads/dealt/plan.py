"""Budgets and barriers of the dealt Hopper decode of many heads, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashdsa.kernels.attention.sm90.decode.key_rows.plan import DealtKeyRowsPlan
from flashdsa.kernels.attention.sm90.decode.many_heads.plan import ManyHeadsPlan
from flashdsa.plan import SmemRegion


@dataclass(frozen=True)
class DealtManyHeadsPlan(DealtKeyRowsPlan, ManyHeadsPlan):
    """One compiled dealt kernel; fields as of the kernel of CTAs alone."""

    @property
    def buffers(self) -> list[SmemRegion]:
        """Shared memory regions before the mbarriers, in order."""
        does = "rows of 32 keys a stage"
        return [replace(one, holds=does) if one.name == "k" else one for one in super().buffers]
