"""Budget of the kernel that puts lists in the order of their scores, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.plan import TOPK
from flashdsa.plan import SmemRegion, UniformPlan

WORD = 4


@dataclass(frozen=True)
class OrderPlan(UniformPlan):
    """One compiled kernel: a warp sorts a list, alone in its CTA.

    Attributes:
        width: entries that it sorts; missing entries of a shorter list count as worst.
    """

    width: int = 2048

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

    @property
    def regions(self) -> list[SmemRegion]:
        return [
            SmemRegion("words", (self.width + WARP_SIZE) * WORD, 16, "in order, a gap a lane"),
            SmemRegion("list", self.width * WORD, 16, "keys of the scores, then rows"),
        ]
