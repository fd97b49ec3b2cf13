"""Budget of the top-k of given scores, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.kernels.indexer.plan import Lists
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.plan import SmemRegion

_PAGES = ("pages", "queries", "weights", "page_valid", "page_full", "page_empty")


GIVEN_SCORES = Lists(refill_pages=64)


@dataclass(frozen=True)
class TopkPlan(IndexerPlan):
    """The fused indexer's plan without pages: 64 given scores stand for one.

    Attributes:
        read_together: scores that a thread reads at once; the list has room for as many of all.
    """

    lists: Lists = GIVEN_SCORES
    read_together: int = 8

    def __post_init__(self) -> None:
        """Check the choices against each other, too."""
        super().__post_init__()
        if self.refill_entries < self.read_together * self.consumer_threads:
            raise ValueError("lists.refill_pages: no room for what all threads read at once")

    @property
    def name(self) -> str:
        """Exported name of its function."""
        return f"topk_k{self.topk}" + ("_sorted" if self.sorted else "")

    @property
    def scheduled(self) -> bool:
        """The lengths always decide."""
        return True

    @property
    def load_warps(self) -> int:
        """One load warp: it only announces tiles."""
        return 1

    @property
    def pages_in_order(self) -> int | None:
        """Scores are read in the order of positions."""
        return None

    @property
    def lists_in_order(self) -> bool:
        """Given scores are appended to the list, in no special order."""
        return False

    @property
    def regions(self) -> list[SmemRegion]:
        """Shared memory regions, in order."""
        return [region for region in super().regions if region.name not in _PAGES]
