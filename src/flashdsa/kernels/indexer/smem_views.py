"""A CTA's shared memory as typed views, made from the plan's regions and barriers, and the consumer
threads that select in it: their context, their syncs and sums.
"""

from typing import Any, NamedTuple

from cutlass import Float32, Int32, cute

from flashdsa.dsl.memory import Memory
from flashdsa.dsl.pipeline import Barriers
from flashdsa.dsl.static import Static
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer import sizes
from flashdsa.kernels.indexer.plan import CONSUMER_BARRIER


class SelectBuffers(NamedTuple):
    """Shared memory that the consumers select in. No other role and no other CTA touches it, but
    that the producer reads `own_rows`, `lengths` and the scratch words of the schedule after a
    CTA-wide barrier."""

    keys: cute.Tensor  # (list_capacity,) Int32, bits of Uint32
    positions: cute.Tensor  # (list_capacity,) Int32, bits of Uint32
    histogram: cute.Tensor  # (NUM_BINS,) Int32
    candidates: cute.Tensor  # (max_candidates * ENTRY_WORDS,) Int32: keys and positions
    bitmap: cute.Tensor  # (BITMAP_WORDS,) Int32, the histogram's memory
    own_rows: Any  # (MAX_OWN_ROWS,) Int32: the group's rows, in their order; None: never ordered
    lengths: Any  # (ORDERED_ROWS,) Int32: tokens of all rows, if each is weighed alone; None: never
    scratch: cute.Tensor  # (SCRATCH_WORDS,) Int32; what lies where: `Scratch`


class Scratch:
    """Words of `SelectBuffers.scratch`, by what lies there."""

    WARP_SUMS = 0  # one word a consumer warp, also the result of its deadline
    FOUND = 16  # result of a round, see `Found`
    BEFORE = 23  # winning candidates of the CTAs before this one
    COUNT = 36  # entries in the list
    CANDIDATES = 37  # entries among the candidates
    THRESHOLD = 38  # key and position of the last winner
    PART = 40  # first position of the part that is merged, and one past its last
    TALLY = 42  # tally of all rows, see schedule/row_schedule.py
    COORD = 48  # coordinates of the caller's group, see schedule/deadlines.py
    FLOOR = 56  # a key below which no entry of a split row wins, see select/tiles.py
    TOP = 57  # the best key that the caller, or the row, publishes, see select/published.py
    RANGE = 62  # lowest and highest key of the entries that may win, see select/tiles.py


class ClusterBuffers(NamedTuple):
    """Messages between the CTAs that share a row; senders are ranks in the cluster. The other CTAs'
    `coarse` counts of a row or a round may come as soon as they have this CTA's `fine` counts of
    the round before. The other buffers are written only after the `coarse` counts of this CTA
    came."""

    coarse: cute.Tensor  # (MAX_CLUSTER * BIN_GROUPS,) Int32
    own_coarse: cute.Tensor  # (BIN_GROUPS,) Int32
    fine: cute.Tensor  # (MAX_CLUSTER * BIN_GROUP,) Int32
    received: cute.Tensor  # (max_candidates * ENTRY_WORDS,) Int32: entries to compare
    above: cute.Tensor  # (MAX_CLUSTER,) Int32: entries above the last round's bin
    tickets: Any  # (MAX_CLUSTER,) Int32: see select/tiles.py; None: rows are not split
    coarse_full: Barriers
    fine_full: Barriers
    received_full: Barriers
    tickets_full: Any  # Barriers; None: rows are not split


class InputBuffers(NamedTuple):
    """Buffers that the load warps fill and the consumers read, as one of the two ends sees it."""

    pages: Any  # pointer to bytes, stage s at + s * stage_bytes
    queries: Any  # pointer to bytes, stage s at + s * query_bytes
    weights: Any  # (tile_stages * tile_heads,) Float32
    tiles: cute.Tensor  # (tile_stages * TILE_WORDS,) Int32: descriptions of work tiles
    halves: Any  # (tile_heads,) Float32: see sm90/score_pairs.py; None: rows are scored alone
    page_valid: Any  # (ring_stages * valid_words,) Int32: 1: the page id is in the cache; gathered
    # tokens have a bit each, 4 a word
    page_ring: Any  # RingProducer or RingConsumer
    tile_ring: Any  # RingProducer or RingConsumer


def select_buffers_in(memory: Memory, plan: Any) -> SelectBuffers:
    """Views of the regions to select in."""
    return SelectBuffers(
        keys=memory.keys.array(Int32, plan.lists.capacity),
        positions=memory.positions.array(Int32, plan.lists.capacity),
        histogram=memory.histogram.array(Int32, sizes.NUM_BINS),
        candidates=memory.candidates.array(Int32, plan.max_candidates * sizes.ENTRY_WORDS),
        bitmap=memory.histogram.array(Int32, sizes.BITMAP_WORDS),
        own_rows=memory.own_rows.array(Int32, sizes.MAX_OWN_ROWS) if plan.splits else None,
        lengths=memory.lengths.array(Int32, sizes.ORDERED_ROWS) if plan.splits else None,
        scratch=memory.scratch.array(Int32, sizes.SCRATCH_WORDS),
    )


def cluster_buffers_in(memory: Memory, plan: Any) -> ClusterBuffers:
    """Views of what other CTAs write to."""
    return ClusterBuffers(
        coarse=memory.coarse.array(Int32, sizes.MAX_CLUSTER * sizes.BIN_GROUPS),
        own_coarse=memory.own_coarse.array(Int32, sizes.BIN_GROUPS),
        fine=memory.fine.array(Int32, sizes.MAX_CLUSTER * sizes.BIN_GROUP),
        received=memory.received.array(Int32, plan.max_candidates * sizes.ENTRY_WORDS),
        above=memory.above.array(Int32, sizes.MAX_CLUSTER),
        tickets=memory.tickets.array(Int32, sizes.MAX_CLUSTER) if plan.splits else None,
        coarse_full=memory.coarse_full,
        fine_full=memory.fine_full,
        received_full=memory.received_full,
        tickets_full=memory.tickets_full if plan.splits else None,
    )


def input_buffers_in(memory: Memory, plan: Any, end: Any) -> InputBuffers:
    """Views of what the load warps fill; `end`: RingProducer or RingConsumer."""
    return InputBuffers(
        pages=memory.pages.bytes(),
        queries=memory.queries.bytes(),
        weights=memory.weights.array(Float32, plan.lists.tile_stages * plan.tile_heads),
        tiles=memory.work_tiles.array(Int32, plan.lists.tile_stages * sizes.TILE_WORDS),
        halves=memory.halves.array(Float32, plan.tile_heads) if plan.in_pairs else None,
        page_valid=memory.page_valid.array(Int32, plan.ring_stages * plan.valid_words),
        page_ring=end(memory.page_full, memory.page_empty),
        tile_ring=end(memory.tile_full, memory.tile_empty),
    )


class Selecting(NamedTuple):
    """A consumer thread and what it selects with. Waits for page_full and tile_full, arrives at
    page_empty and tile_empty. The phases of events are no part of it: who waits returns them, as
    loops must carry them. Who writes to a buffer takes it out first, as a loop carries all fields
    of what it writes to."""

    inputs: InputBuffers  # the consumer's end
    select: SelectBuffers
    cluster: ClusterBuffers
    coord: Any  # Coord or PackedCoord
    output: Any  # Output
    published: Any  # Published; None: a row is one cluster's
    thread: Int32
    static: Static  # the plan

    @property
    def plan(self) -> Any:
        return self.static.value

    @property
    def threads(self) -> int:
        return int(self.plan.consumer_threads)

    @property
    def bins(self) -> int:
        return sizes.NUM_BINS

    @property
    def most_parts(self) -> int:
        return sizes.MAX_CLUSTER

    def sync(self) -> None:
        consumer_sync(self.plan)


def consumer_sync(plan: Any) -> None:
    """Sync all consumers; it orders their shared memory accesses."""
    cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=plan.consumer_threads)


@cute.jit
def warp_sums(s: Selecting, of_warp: Int32) -> Int32:
    """Return the `of_warp` of warp i in lane i, 0 in the other lanes. One consumer sync."""
    select, thread, plan = s.select, s.thread, s.plan
    lane = thread % WARP_SIZE
    if lane == 0:
        select.scratch[Scratch.WARP_SUMS + thread // WARP_SIZE] = of_warp
    # All consumers: every warp's word is in scratch. It is written again only after another sync.
    consumer_sync(plan)
    sums = Int32(0)
    if lane < plan.consumer_warps:
        sums = select.scratch[Scratch.WARP_SUMS + lane]
    return sums


@cute.jit
def before_warp(sums: Int32, thread: Int32) -> Int32:
    """Sum of the `warp_sums` of the warps before the caller's."""
    before = Int32(0)
    if thread % WARP_SIZE < thread // WARP_SIZE:
        before = sums
    return cute.arch.warp_redux_sync(before, "add")
