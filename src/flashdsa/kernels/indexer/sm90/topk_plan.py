"""Budget of the top-k of given scores, as data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from flashdsa.kernels.indexer.plan import TOPK, Lists
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.plan import SmemRegion

_PAGES = ("pages", "queries", "weights", "page_valid", "page_full", "page_empty")


GIVEN_SCORES = Lists(capacity=20480, refill_pages=64, first_fill_pages=128, fill_step_pages=0)
"""Parts of up to `capacity` scores are never cut; longer ones are cut early, so that later scores
that cannot win are not listed."""


@dataclass(frozen=True)
class TopkPlan(IndexerPlan):
    """The fused indexer's plan without pages: 64 given scores stand for one.

    Attributes:
        read_together: scores that a thread reads at once; the list has room for as many of all.
        of_cache: the scores are those of a paged cache, with the word INVALID for a token of a page
            that the cache does not have, which never wins; ids are slots, if not `positions`.
    """

    lists: Lists = GIVEN_SCORES
    read_together: int = 8
    of_cache: bool = False
    scheduled = True
    load_warps = 1  # it only announces tiles
    pages_in_order = None  # scores are read in the order of positions
    lists_in_order = False  # scores are appended, in no special order

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refill_entries < self.read_together * self.consumer_threads:
            raise ValueError("lists.refill_pages: no room for what all threads read at once")

    @property
    def name(self) -> str:
        kinds = {"sorted": self.sorted, "cache": self.of_cache, "positions": self.positions}
        return "_".join((f"topk_k{self.topk}", *(name for name, so in kinds.items() if so)))

    @property
    def regions(self) -> list[SmemRegion]:
        return [region for region in super().regions if region.name not in _PAGES]


TOPK_PLANS = tuple(
    TopkPlan(topk=topk, sorted=by_score)
    for topk, by_score in product(reversed(TOPK), (False, True))
)
"""The kernels that rank given scores."""
RANKING_PLANS = (
    *(TopkPlan(topk=topk, of_cache=True) for topk in reversed(TOPK)),
    TopkPlan(of_cache=True, positions=True),
)
"""The kernels that rank scores of a cache."""
