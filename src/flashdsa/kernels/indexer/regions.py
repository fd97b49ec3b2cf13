"""Shared memory regions that every indexer plan selects in, whichever architecture scores."""

from __future__ import annotations

from typing import Any

from flashdsa.hw import MBARRIER_BYTES
from flashdsa.kernels.indexer import sizes
from flashdsa.kernels.indexer.plan import By
from flashdsa.plan import Arrives, Barrier, Role, SmemRegion

WORD_BYTES = 4


def select_regions(plan: Any) -> list[SmemRegion]:
    """The list, its histogram, and what the CTAs that share a row send each other."""
    team = _team_regions(plan)
    others = [
        SmemRegion("other_team", sum(region.bytes for region in team), 64, "the same of its row")
    ]
    return [
        *team,
        *(others if plan.teams > 1 else []),
        *_schedule_regions(plan),
        *_sorting_regions(plan),
        *_split_regions(plan),
    ]


def _team_regions(plan: Any) -> list[SmemRegion]:
    """Return the regions of one row: of one team if the CTA has two."""
    ctas = plan.largest_cluster
    regions = [
        SmemRegion("keys", plan.lists.capacity * WORD_BYTES, 16, "list: sortable scores"),
        SmemRegion("positions", plan.lists.capacity * WORD_BYTES, 16, "list: token positions"),
        SmemRegion("histogram", sizes.NUM_BINS * WORD_BYTES, 16, "bins, or the winners' bitmap"),
        SmemRegion(
            "candidates", plan.candidate_words * WORD_BYTES, 16, "own entries of the cut-off bin"
        ),
        SmemRegion("fine", ctas * sizes.BIN_GROUP * WORD_BYTES, 16, "received: bins of a group"),
        SmemRegion("received", plan.received_bytes, 16, "received: candidates"),
        SmemRegion("coarse", ctas * sizes.BIN_GROUPS * WORD_BYTES, 16, "received: groups of bins"),
        SmemRegion(
            "above", sizes.MAX_CLUSTER * WORD_BYTES, 16, "received: entries above the last bin"
        ),
        SmemRegion("own_coarse", sizes.BIN_GROUPS * WORD_BYTES, 16, "what is sent there"),
    ]
    # Two teams have a scratch each.
    return [*regions, scratch_region(sizes.PAIRS_SCRATCH_WORDS)] if plan.teams > 1 else regions


def scratch_region(words: int = sizes.SCRATCH_WORDS) -> SmemRegion:
    """Words of the consumers that select in a row."""
    return SmemRegion("scratch", words * 4, 16, "scans and broadcasts of the consumers")


def select_barrier_regions(plan: Any) -> list[SmemRegion]:
    """One mbarrier of each team for each of the messages of every row."""
    size = plan.teams * MBARRIER_BYTES
    return [
        SmemRegion("coarse_full", size, 8, "mbarrier: counts of groups are there"),
        SmemRegion("fine_full", size, 8, "mbarrier: counts of bins are there"),
        SmemRegion("received_full", size, 8, "mbarrier: candidates are there"),
    ]


def _schedule_regions(plan: Any) -> list[SmemRegion]:
    """Return the regions that hold the order of rows in a CTA."""
    if not plan.scheduled:
        return []
    return [
        SmemRegion("lengths", sizes.ORDERED_ROWS * WORD_BYTES, 16, "tokens of all rows"),
        SmemRegion("own_rows", sizes.MAX_OWN_ROWS * WORD_BYTES, 16, "rows of the CTA's group"),
    ]


def _sorting_regions(plan: Any) -> list[SmemRegion]:
    """Return the regions in which the group's first CTA gets all winners, to sort them."""
    if not plan.sorted:
        return []
    return [
        SmemRegion(
            "winners", plan.topk * sizes.ENTRY_WORDS * WORD_BYTES, 16, "received: to be sorted"
        ),
        SmemRegion("winners_full", MBARRIER_BYTES, 8, "mbarrier: winners are there"),
    ]


def _split_regions(plan: Any) -> list[SmemRegion]:
    """Return the regions in which the CTAs of a split row's cluster show each other that they
    published."""
    if plan.rows is not By.CLUSTERS:
        return []
    return [
        SmemRegion("tickets", sizes.MAX_CLUSTER * WORD_BYTES, 16, "received: order of publishing"),
        SmemRegion("tickets_full", MBARRIER_BYTES, 8, "mbarrier: tickets are there"),
    ]


def select_barriers(plan: Any, select: Role) -> tuple[Barrier, ...]:
    """The events among consumers; those without a region are not in the plan."""
    one = Arrives.ONE_THREAD
    teams, ctas = plan.teams, plan.largest_cluster
    coarse_bytes = ctas * sizes.BIN_GROUPS * WORD_BYTES
    fine_bytes = ctas * sizes.BIN_GROUP * WORD_BYTES
    received_bytes = plan.received_bytes + sizes.MAX_CLUSTER * WORD_BYTES
    ticket_bytes = sizes.MAX_CLUSTER * WORD_BYTES
    winner_bytes = plan.topk * sizes.ENTRY_WORDS * WORD_BYTES
    every_cta = Arrives.EVERY_CTA
    return (
        Barrier("coarse_full", teams, select, one, select, coarse_bytes, "groups' counts"),
        Barrier("fine_full", teams, select, one, select, fine_bytes, "bins' counts"),
        Barrier(
            "received_full",
            teams,
            select,
            one,
            select,
            received_bytes,
            "candidates, counts above them",
        ),
        Barrier("tickets_full", 1, select, every_cta, select, ticket_bytes, "who published last"),
        Barrier("winners_full", 1, select, one, select, winner_bytes, "winners to sort"),
    )
