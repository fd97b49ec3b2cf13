"""Tiles, budget and barriers of the scores-only kernel, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.kernels.indexer.regions import select_barrier_regions, select_regions
from flashdsa.kernels.indexer.sm100.plan import IndexerPlan
from flashdsa.plan import SmemRegion


@dataclass(frozen=True)
class LogitsPlan(IndexerPlan):
    """The fused indexer's plan without the memory of the selection: only its stream of pages."""

    stages: int = 24

    @property
    def name(self) -> str:
        """Exported name of its function."""
        return f"sm100_indexer_logits_h{self.num_heads}_p{self.pages_per_stage}"

    @property
    def unscored_length(self) -> int:
        """Every token of every row is scored."""
        return 0

    @property
    def load_registers(self) -> int:
        """Registers of a load thread, which also cuts the line of pages (see
        schedule/page_partition.py)."""
        return 40

    @property
    def regions(self) -> list[SmemRegion]:
        """Shared memory regions, in order."""
        selecting = (*select_regions(self), *select_barrier_regions(self))
        absent = {region.name for region in selecting} | {"scratch"}
        return [region for region in super().regions if region.name not in absent]
