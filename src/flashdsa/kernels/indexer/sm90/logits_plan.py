"""Tiles, budget and barriers of the scores-only kernel, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.plan import SmemRegion

_STREAM = (
    "pages",
    "queries",
    "weights",
    "work_tiles",
    "page_valid",
    "page_full",
    "page_empty",
    "tile_full",
    "tile_empty",
)


@dataclass(frozen=True)
class LogitsPlan(IndexerPlan):
    """The fused indexer's plan without the memory of the selection: only its stream of pages."""

    stages: int = 16

    @property
    def name(self) -> str:
        """Exported name of its function."""
        return f"indexer_logits_h{self.num_heads}"

    @property
    def unscored_length(self) -> int:
        """Every token of every row is scored."""
        return 0

    @property
    def regions(self) -> list[SmemRegion]:
        """Shared memory regions, in order."""
        return [region for region in super().regions if region.name in _STREAM]
