"""Sizes of the kernel of `indexer_scores`, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.hw import SM90, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.plan import SmemRegion, UniformPlan
from flashdsa.problem import INDEX_HEAD_DIM

TILE_KEYS = 64
"""Rows of a product."""
NUM_HEADS = (16, 32, 64)
"""Columns of a product. Fewer heads are padded with columns of zeros."""
BF16 = 2
FP32 = 4
CTA_BYTES = 1024
"""Bytes of shared memory that the system takes of each CTA."""
SM_BYTES = SM90.smem_bytes + CTA_BYTES


@dataclass(frozen=True)
class ScoresPlan(UniformPlan):
    """One compiled kernel. A CTA is a warpgroup, and takes the slots of a query or some of them.

    Attributes:
        num_heads: columns of a product. ctas: of an SM; they hide each other's waits.
    """

    num_heads: int = 64
    ctas: int = 4

    @property
    def carveout(self) -> int:
        """Percentage of an SM's shared memory that its CTAs take; the rest is cache."""
        return -(-100 * self.ctas * (self.smem_bytes + CTA_BYTES) // SM_BYTES)

    @property
    def threads(self) -> int:
        return WARPGROUP_SIZE

    @property
    def regions(self) -> list[SmemRegion]:
        ends = WARPGROUP_SIZE // WARP_SIZE * FP32
        return [
            SmemRegion("q", self.num_heads * INDEX_HEAD_DIM * BF16, 1024, "a query's Q, SW128"),
            SmemRegion("weights", self.num_heads * FP32, 16, "its weights"),
            SmemRegion("ends", ends, 16, "the ends that warps find of its list"),
        ]

    @property
    def name(self) -> str:
        return f"indexer_scores_h{self.num_heads}"
