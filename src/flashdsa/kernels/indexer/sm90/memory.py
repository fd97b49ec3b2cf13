"""The kernel's shared memory as typed views, made from the plan."""

from typing import Any, NamedTuple

from cutlass import Float32, Int32, cute

from flashdsa.dsl.arena import Arena
from flashdsa.dsl.pipeline import Barriers
from flashdsa.kernels.indexer.sm90.plan import (
    BIN_GROUP,
    BIN_GROUPS,
    BITMAP_WORDS,
    ENTRY_WORDS,
    MAX_CLUSTER,
    MAX_DEALS,
    NUM_BINS,
    ORDERED_ROWS,
    SEGMENT_WORDS,
)


class Ranking(NamedTuple):
    """What the consumers rank in. All of it is theirs alone."""

    keys: cute.Tensor  # (list_capacity,) Int32, bits of Uint32
    positions: cute.Tensor  # (list_capacity,) Int32, bits of Uint32
    histogram: cute.Tensor  # (NUM_BINS,) Int32
    candidates: cute.Tensor  # (max_candidates, ENTRY_WORDS) Int32: keys and positions
    bitmap: cute.Tensor  # (BITMAP_WORDS,) Int32, the histogram's memory
    own_rows: Any  # (MAX_DEALS,) Int32: rows dealt to the group, in their order; None: never
    lengths: Any  # (ORDERED_ROWS,) Int32: of all rows, where they are weighed; None: never
    scratch: cute.Tensor  # (64,) Int32; places: see the constants below


SCRATCH_WARP_SUMS = 0  # one word a consumer warp
SCRATCH_FOUND = 16  # what a round found, see `Found`
SCRATCH_COUNT = 36  # entries in the list
SCRATCH_CANDIDATES = 37  # entries among the candidates
SCRATCH_PART = 40  # first and last position of what a team's CTA ranks of all teams' best
SCRATCH_THRESHOLD = 38  # key and position of the last winner
SCRATCH_TALLY = 42  # of all rows, see order.py
SCRATCH_HALVINGS = 45  # of the clusters, likewise
SCRATCH_MOST_WORK = 46  # of a group, likewise
SCRATCH_OWN_WORK = 47  # of the caller's, if groups get several rows
SCRATCH_BEFORE = 23  # winning candidates of CTAs before this one


class Mailboxes(NamedTuple):
    """What the CTAs that share a row send each other; senders are ranks in the cluster.

    Others' `coarse` counts of a row or a round may come as soon as they have this CTA's `fine` ones
    of the round before. The other boxes are written only after the `coarse` counts of this CTA
    came.
    """

    coarse: cute.Tensor  # (MAX_CLUSTER, BIN_GROUPS) Int32
    own_coarse: cute.Tensor  # (BIN_GROUPS,) Int32
    fine: cute.Tensor  # (MAX_CLUSTER, BIN_GROUP) Int32
    received: cute.Tensor  # (max_candidates, ENTRY_WORDS) Int32: keys and positions to compare
    above: cute.Tensor  # (MAX_CLUSTER,) Int32: entries above the last round's bin
    tickets: Any  # (MAX_CLUSTER,) Int32: see teams.py; None: no teams
    winners: Any  # (topk, ENTRY_WORDS) Int32 in the cluster's first CTA; None: not sorted
    coarse_full: Barriers
    fine_full: Barriers
    received_full: Barriers
    tickets_full: Any  # Barriers; None: no teams
    winners_full: Any  # Barriers; None: not sorted


class Inputs(NamedTuple):
    """What the producer warps fill and the consumers read, as one of the two ends sees it."""

    pages: Any  # pointer, stage s at + s * stage_bytes
    queries: Any
    weights: Any  # (segment_stages * num_heads,) Float32
    segments: cute.Tensor  # (segment_stages * SEGMENT_WORDS,) Int32
    page_valid: Any  # (stages,) Int32
    page_ring: Any  # RingProducer or RingConsumer; None, and all of pages: there are none
    segment_ring: Any  # likewise


def ranking_in(arena: Arena, plan: Any) -> Ranking:
    """Views of the regions to rank in."""
    return Ranking(
        keys=arena.array("keys", Int32, plan.list_capacity),
        positions=arena.array("positions", Int32, plan.list_capacity),
        histogram=arena.array("histogram", Int32, NUM_BINS),
        candidates=arena.array("candidates", Int32, plan.max_candidates * ENTRY_WORDS),
        bitmap=arena.array("histogram", Int32, BITMAP_WORDS),
        own_rows=arena.array("own_rows", Int32, MAX_DEALS) if plan.dealt else None,
        lengths=arena.array("lengths", Int32, ORDERED_ROWS) if plan.dealt else None,
        scratch=arena.array("scratch", Int32, 64),
    )


def mailboxes_in(arena: Arena, plan: Any) -> Mailboxes:
    """Views of what others write to."""
    return Mailboxes(
        coarse=arena.array("coarse", Int32, MAX_CLUSTER * BIN_GROUPS),
        own_coarse=arena.array("own_coarse", Int32, BIN_GROUPS),
        fine=arena.array("fine", Int32, MAX_CLUSTER * BIN_GROUP),
        received=arena.array("received", Int32, plan.max_candidates * ENTRY_WORDS),
        above=arena.array("above", Int32, MAX_CLUSTER),
        tickets=arena.array("tickets", Int32, MAX_CLUSTER) if plan.teams else None,
        winners=arena.array("winners", Int32, plan.topk * ENTRY_WORDS) if plan.sorted else None,
        coarse_full=arena.barriers("coarse_full"),
        fine_full=arena.barriers("fine_full"),
        received_full=arena.barriers("received_full"),
        tickets_full=arena.barriers("tickets_full") if plan.teams else None,
        winners_full=arena.barriers("winners_full") if plan.sorted else None,
    )


def inputs_in(arena: Arena, plan: Any, end: Any) -> Inputs:
    """Views of the regions that the producer fills. `end`: arena.producer or arena.consumer."""
    return segments_in(arena, plan, end)._replace(
        pages=arena.bytes("pages"),
        queries=arena.bytes("queries"),
        weights=arena.array("weights", Float32, plan.segment_stages * plan.num_heads),
        page_valid=arena.array("page_valid", Int32, plan.ring_stages),
        page_ring=end("page_full", "page_empty"),
    )


def segments_in(arena: Arena, plan: Any, end: Any) -> Inputs:
    """The same of the top-k of given scores, which has segments only."""
    return Inputs(
        pages=None,
        queries=None,
        weights=None,
        segments=arena.array("segments", Int32, plan.segment_stages * SEGMENT_WORDS),
        page_valid=None,
        page_ring=None,
        segment_ring=end("segment_full", "segment_empty"),
    )
