"""Shared memory regions that every indexer plan selects in, whichever architecture scores."""

from __future__ import annotations

from typing import Any

from flashdsa.hw import MBARRIER_BYTES
from flashdsa.kernels.indexer import sizes
from flashdsa.plan import Arrives, Barrier, Role, SmemRegion

WORD_BYTES = 4


def select_regions(plan: Any) -> list[SmemRegion]:
    """The list, its histogram, and what the CTAs that share a row send each other."""
    return [*_row_regions(plan), *_schedule_regions(plan), *_split_regions(plan)]


def _row_regions(plan: Any) -> list[SmemRegion]:
    """Return the regions of one row."""
    ctas = sizes.MAX_CLUSTER
    return [
        SmemRegion("keys", plan.lists.capacity * WORD_BYTES, 16, "list: sortable scores"),
        SmemRegion("positions", plan.lists.capacity * WORD_BYTES, 16, "list: token positions"),
        SmemRegion("histogram", sizes.NUM_BINS * WORD_BYTES, 16, "bins, or the winners' bitmap"),
        SmemRegion("candidates", plan.received_bytes, 16, "own entries of the cut-off bin"),
        SmemRegion("fine", ctas * sizes.BIN_GROUP * WORD_BYTES, 16, "received: bins of a group"),
        SmemRegion("received", plan.received_bytes, 16, "received: candidates"),
        SmemRegion("coarse", ctas * sizes.BIN_GROUPS * WORD_BYTES, 16, "received: groups of bins"),
        SmemRegion("above", ctas * WORD_BYTES, 16, "received: entries above the last bin"),
        SmemRegion("own_coarse", sizes.BIN_GROUPS * WORD_BYTES, 16, "what is sent there"),
    ]


def scratch_region() -> SmemRegion:
    """Words of the consumers."""
    size = sizes.SCRATCH_WORDS * WORD_BYTES
    return SmemRegion("scratch", size, 16, "scans and broadcasts of the consumers")


def select_barrier_regions() -> list[SmemRegion]:
    """One mbarrier for each of the messages of every row."""
    return [
        SmemRegion("coarse_full", MBARRIER_BYTES, 8, "mbarrier: counts of groups are there"),
        SmemRegion("fine_full", MBARRIER_BYTES, 8, "mbarrier: counts of bins are there"),
        SmemRegion("received_full", MBARRIER_BYTES, 8, "mbarrier: candidates are there"),
    ]


def _schedule_regions(plan: Any) -> list[SmemRegion]:
    """Return the regions that hold the order of rows in a CTA."""
    if not plan.scheduled:
        return []
    return [
        SmemRegion("lengths", sizes.ORDERED_ROWS * WORD_BYTES, 16, "tokens of all rows"),
        SmemRegion("own_rows", sizes.MAX_OWN_ROWS * WORD_BYTES, 16, "rows of the CTA's group"),
    ]


def _split_regions(plan: Any) -> list[SmemRegion]:
    """Return the regions in which the CTAs of a split row's cluster show each other that they
    published."""
    if not plan.splits:
        return []
    return [
        SmemRegion("tickets", sizes.MAX_CLUSTER * WORD_BYTES, 16, "received: order of publishing"),
        SmemRegion("tickets_full", MBARRIER_BYTES, 8, "mbarrier: tickets are there"),
    ]


def select_barriers(plan: Any, select: Role) -> tuple[Barrier, ...]:
    """The events among consumers; those without a region are not in the plan."""
    one, ctas = Arrives.ONE_THREAD, sizes.MAX_CLUSTER
    coarse_bytes = ctas * sizes.BIN_GROUPS * WORD_BYTES
    fine_bytes = ctas * sizes.BIN_GROUP * WORD_BYTES
    received_bytes = plan.received_bytes + ctas * WORD_BYTES
    ticket_bytes = ctas * WORD_BYTES
    every_cta = Arrives.EVERY_CTA
    return (
        Barrier("coarse_full", 1, select, one, select, coarse_bytes, "groups' counts"),
        Barrier("fine_full", 1, select, one, select, fine_bytes, "bins' counts"),
        Barrier(
            "received_full", 1, select, one, select, received_bytes, "candidates, counts above them"
        ),
        Barrier("tickets_full", 1, select, every_cta, select, ticket_bytes, "who published last"),
    )
