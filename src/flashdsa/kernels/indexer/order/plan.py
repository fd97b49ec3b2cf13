"""Budget of the kernel that puts lists in the order of their scores, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from flashdsa.hw import SM90, WARP_SIZE, ArchSpec
from flashdsa.kernels.indexer.plan import TOPK
from flashdsa.plan import Role, SmemPlan, SmemRegion, plan_smem

WORD = 4


@dataclass(frozen=True)
class OrderPlan:
    """One compiled kernel: a warp sorts a list, alone in its CTA.

    Attributes:
        width: entries that it sorts; missing entries of a shorter list count as worst.
    """

    width: int = 2048
    arch: ClassVar[ArchSpec] = SM90
    roles: ClassVar[tuple[Role, ...]] = ()  # the kernel has one warp

    def __post_init__(self) -> None:
        if self.width not in TOPK:
            raise ValueError(f"width: expected one of {TOPK}; got {self.width}")
        _ = self.smem

    @property
    def name(self) -> str:
        return f"order_{self.width}"

    @property
    def each(self) -> int:
        """Entries of a lane: neighbours of the sorted list."""
        return self.width // WARP_SIZE

    @property
    def index_bits(self) -> int:
        """Low bits of a word, which give its entry's index in the list. The other bits are of the
        score."""
        return self.width.bit_length() - 1

    @cached_property
    def smem(self) -> SmemPlan:
        return plan_smem(
            [
                SmemRegion("words", (self.width + WARP_SIZE) * WORD, 16, "in order, a gap a lane"),
                SmemRegion("list", self.width * WORD, 16, "keys of the scores, then rows"),
            ],
            self.arch.smem_bytes,
        )

    @property
    def smem_bytes(self) -> int:
        return self.smem.total
