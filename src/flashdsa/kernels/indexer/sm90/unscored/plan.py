"""Budget of the kernel for rows that need no scores, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashdsa.hw import WARP_SIZE
from flashdsa.plan import Role
from flashdsa.problem import PAGE_SIZE

THREADS = 512
"""Threads of a CTA, which writes a row: each has four of 2,048 ids."""
MOST_PAGES = WARP_SIZE
"""Widest table: each lane of a warp has one page of a row."""


@dataclass(frozen=True)
class UnscoredPlan:
    """The compiled kernel."""

    roles: ClassVar[tuple[Role, ...]] = ()  # all warps do the same
    smem_bytes = 0

    @property
    def name(self) -> str:
        return "indexer_unscored"


def most_pages(topk: int) -> int:
    """Pages a row of the widest table in which no row has more than `topk` tokens."""
    return min(topk // PAGE_SIZE, MOST_PAGES)
