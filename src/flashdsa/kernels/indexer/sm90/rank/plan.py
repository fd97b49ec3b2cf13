"""Budget of the kernel that ranks scores, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.plan import TOPK
from flashdsa.kernels.indexer.sizes import RANK_BINS
from flashdsa.plan import SmemRegion, UniformPlan

WORD = 4
LARGEST_CLUSTER = 8
"""CTAs of a row, at most: what every GPU starts."""


class Of(StrEnum):
    """Entries that are ranked."""

    SCORES = "scores"  # a score of any number
    CACHE = "cache"  # a token's, of a paged cache; the word INVALID: the cache has no such page
    BLOCKS = "blocks"  # the best score of a block of tokens
    LISTED = "listed"  # a token's of a listed block


@dataclass(frozen=True)
class RankPlan(UniformPlan):
    """One compiled kernel: the CTAs of a cluster rank a row, each an equal part of it.

    Attributes:
        of: what is ranked.
        threads: of a CTA. ctas: that an SM has room for.
        together: entries that a thread loads at once.
        max_candidates: entries of a row in the list that may win or not, at most.
        part_entries: entries, or scores of blocks, from which another CTA takes part.
        marked_words: bits of the blocks of a CTA's part of a row, 1 where a block is listed.
        most_listed: listed blocks of a part up to which the others are not looked at.
    """

    of: Of = Of.CACHE
    threads: int = 1024
    ctas: int = 1
    together: int = 8
    max_candidates: int = 2048
    part_entries: int = 4096
    marked_words: int = 16384
    most_listed: int = 2048

    @property
    def name(self) -> str:
        return f"rank_{self.of.value}" + "_many" * (self.ctas > 1)

    @property
    def in_levels(self) -> bool:
        """Entries are blocks, or tokens of listed blocks: see levels.py."""
        return self.of in (Of.BLOCKS, Of.LISTED)

    @property
    def warps(self) -> int:
        return self.threads // WARP_SIZE

    @property
    def capacity(self) -> int:
        """Entries of the list: winners and candidates of a row."""
        return max(TOPK) + self.max_candidates

    @property
    def most_blocks(self) -> int:
        """Blocks of a CTA's part of a row, at most, of which some are listed."""
        return self.marked_words * WARP_SIZE

    @property
    def regions(self) -> list[SmemRegion]:
        regions = [
            SmemRegion("keys", self.capacity * WORD, 16, "list: keys"),
            SmemRegion("positions", self.capacity * WORD, 16, "list: positions"),
            SmemRegion("bins", RANK_BINS * WORD, 16, "entries in each bin"),
            SmemRegion("totals", RANK_BINS * WORD, 16, "the same of the row"),
            SmemRegion("groups", WARP_SIZE * WORD, 16, "entries in each group of bins"),
            SmemRegion("sums", 2 * self.warps * WORD, 16, "entries of warps, by turns"),
            SmemRegion("parts", 2 * LARGEST_CLUSTER * WORD, 16, "entries of parts, equal ones"),
        ]
        if self.of is Of.LISTED:
            marks = SmemRegion("marks", self.marked_words * WORD, 16, "a bit for each block")
            regions += [marks, SmemRegion("blocks", self.most_listed * WORD, 16, "listed blocks")]
        return regions


def plan_of_many(of: Of) -> RankPlan:
    """The plan for more rows than a GPU has SMs, several of which share one. Rows of a cache may be
    of very unlike lengths, and those of its CTAs share a long one."""
    if of is Of.CACHE:
        return RankPlan(of, threads=512, ctas=2)
    return RankPlan(of, threads=256, ctas=4, marked_words=1024)


RANK_PLANS = tuple(plan for of in Of for plan in (RankPlan(of), plan_of_many(of)))
"""The kernels that rank scores."""
