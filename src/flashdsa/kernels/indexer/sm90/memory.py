"""The kernel's shared memory as typed views, made from the plan."""

from typing import Any, NamedTuple

from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

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
    IndexerPlan,
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
    coarse_full: Any  # pointers to mbarriers
    fine_full: Any
    received_full: Any
    tickets_full: Any
    winners_full: Any


class Pipeline(NamedTuple):
    """Shared memory and barriers between the producer and the consumers."""

    pages: Any  # pointer, stage s at + s * stage_bytes
    queries: Any
    weights: cute.Tensor  # (segment_stages * num_heads,) Float32
    segments: cute.Tensor  # (segment_stages * SEGMENT_WORDS,) Int32
    page_valid: cute.Tensor  # (stages,) Int32
    page_full: Any  # pointers to mbarriers
    page_empty: Any
    segment_full: Any
    segment_empty: Any


class Arena:
    """One block of dynamic shared memory, its regions by the plan's names."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan.smem
        self._base = SmemAllocator().allocate(plan.smem.total, 1024)

    def bytes(self, name: str) -> Any:
        """Pointer to a region."""
        return self._base + self._plan.offset(name)

    def pointer(self, name: str, dtype: Any) -> Any:
        """Pointer to a region's elements."""
        return cute.recast_ptr(self.bytes(name), dtype=dtype)

    def array(self, name: str, dtype: Any, count: int) -> Any:
        """A region as a vector."""
        return cute.make_tensor(self.pointer(name, dtype), cute.make_layout(count))


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
        coarse_full=arena.pointer("coarse_full", Int64),
        fine_full=arena.pointer("fine_full", Int64),
        received_full=arena.pointer("received_full", Int64),
        tickets_full=arena.pointer("tickets_full", Int64) if plan.teams else None,
        winners_full=arena.pointer("winners_full", Int64) if plan.sorted else None,
    )


def pipeline_in(arena: Arena, plan: Any) -> Pipeline:
    """Views of the regions that the producer fills."""
    return Pipeline(
        pages=arena.bytes("pages"),
        queries=arena.bytes("queries"),
        weights=arena.array("weights", Float32, plan.segment_stages * plan.num_heads),
        segments=arena.array("segments", Int32, plan.segment_stages * SEGMENT_WORDS),
        page_valid=arena.array("page_valid", Int32, plan.ring_stages),
        page_full=arena.pointer("page_full", Int64),
        page_empty=arena.pointer("page_empty", Int64),
        segment_full=arena.pointer("segment_full", Int64),
        segment_empty=arena.pointer("segment_empty", Int64),
    )


def allocate(plan: IndexerPlan) -> tuple[Ranking, Mailboxes, Pipeline]:
    """All of the fused kernel's shared memory."""
    arena = Arena(plan)
    return ranking_in(arena, plan), mailboxes_in(arena, plan), pipeline_in(arena, plan)


def prefetch(pointer: Any) -> None:
    """A line of device memory into the second-level cache."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[pointer])
