"""Budget of the kernel for rows that need no scores, as data."""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.hw import WARP_SIZE
from flashdsa.plan import Role
from flashdsa.problem import PAGE_SIZE

THREADS = 512
"""Threads of a CTA, which writes a row: each has four of 2,048 ids."""
MOST_PAGES = WARP_SIZE
"""Widest table: each lane of a warp has one page of a row."""


@dataclass(frozen=True)
class UnscoredPlan:
    """One compiled kernel.

    Attributes:
        positions: ids are token positions, not cache slots.
    """

    positions: bool = False

    @property
    def name(self) -> str:
        """Exported name of its function."""
        return "indexer_unscored" + ("_positions" if self.positions else "")

    @property
    def roles(self) -> tuple[Role, ...]:
        """No roles: all warps do the same."""
        return ()

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: none."""
        return 0


def most_pages(topk: int) -> int:
    """Pages a row of the widest table in which no row has more than `topk` tokens."""
    return min(topk // PAGE_SIZE, MOST_PAGES)
