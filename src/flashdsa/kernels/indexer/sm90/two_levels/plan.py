"""Budget of the ranking in two levels, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.kernels.indexer.plan import Lists
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.plan import SmemRegion

WORD_BITS = 32
ENTRIES = Lists(refill_pages=64)
"""Lists have no room for more: marks of blocks take it."""


@dataclass(frozen=True)
class LevelPlan(TopkPlan):
    """The top-k of given scores, whose entries are blocks, or tokens of listed blocks.

    Attributes:
        among: an entry is a token of a listed block. Otherwise one is a block, its score the best
            of its tokens', and its id its number; of blocks of one token it may be a slot.
        marked_words: bits of the blocks of a CTA's part of a row, 1 where a block is listed.
    """

    lists: Lists = ENTRIES
    among: bool = False
    marked_words: int = 16384
    unscored_length = 0  # entries may be missing anywhere in a row

    @property
    def name(self) -> str:
        kinds = {"among": self.among, "sorted": self.sorted, "positions": self.positions}
        return "_".join(("level", f"k{self.topk}", *(name for name, so in kinds.items() if so)))

    @property
    def most_blocks(self) -> int:
        """Blocks of a CTA's part of a row, at most, of which some are listed."""
        return self.marked_words * WORD_BITS

    @property
    def regions(self) -> list[SmemRegion]:
        marks = SmemRegion("marks", self.marked_words * 4, 16, "a bit for each block of the part")
        return [*super().regions, marks] if self.among else super().regions
