"""The producer warp's work on a segment: announce it and keep its pages in flight."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from flashdsa.dsl.pipeline import PipelineState, RingProducer, acquire_reused
from flashdsa.dsl.tma import EVICT_FIRST, EVICT_LAST, load_box, load_bytes
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.memory import Inputs
from flashdsa.kernels.indexer.sm90.plan import DEPTH_STEPS, PAGE_ROWS
from flashdsa.kernels.indexer.sm90.segments import Rows, Segment, write_segment_words

SPREAD = 5
"""Multiples of it, modulo DEPTH_STEPS, are all steps, and neighbouring ones are far apart."""


class Producer(NamedTuple):
    """Role load. Owns page_full and segment_full, waits for page_empty and segment_empty."""

    inputs: Inputs
    keys_map: Any  # pointer to the pages' tensor map; None: only announce segments
    queries_map: Any  # likewise: of the rows' queries
    weights: Any  # (B, H) fp32, device memory
    block_table: Any  # (B, max_pages) int32, device memory
    num_pages: Int32  # pages of the cache
    rows: Rows
    warp: Int32  # among the role's; the first one announces segments


@cute.jit
def announce(
    c: Producer, number: Int32, segment: Segment, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Description, queries and weights of a segment; segment_full completes with the last byte."""
    if c.warp == 0:
        state = c.inputs.segment_ring.state(number)
        acquire_reused(c.inputs.segment_ring, state, number)
        slot = state.stage
        if lane == 0:
            announce_in(c, slot, segment, plan)
    cute.arch.sync_warp()


@cute.jit
def announce_in(c: Producer, slot: Int32, segment: Segment, plan: cutlass.Constexpr) -> None:
    """One thread: the description and the copies into a free slot."""
    write_segment_words(c.inputs.segments, slot, segment)
    # The arrival releases the description too: the same thread wrote it.
    if const_expr(c.queries_map is None):
        c.inputs.segment_ring.commit(slot)
    else:
        load_query(c, slot, segment.row, plan)


@cute.jit
def finish(c: Producer, number: Int32, lane: Int32, plan: cutlass.Constexpr) -> None:
    """Say that no segment comes any more."""
    if c.warp == 0:
        state = c.inputs.segment_ring.state(number)
        acquire_reused(c.inputs.segment_ring, state, number)
        slot = state.stage
        if lane == 0:
            nothing = Segment(Int32(-1), *(Int32(0) for _ in Segment._fields[1:]))
            write_segment_words(c.inputs.segments, slot, nothing)
            c.inputs.segment_ring.commit(slot)
    cute.arch.sync_warp()


@cute.jit
def load_query(c: Producer, slot: Int32, row: Int32, plan: cutlass.Constexpr) -> None:
    """Arrive at segment_full and start the copies of the row's queries and weights."""
    full = c.inputs.segment_ring.expect(slot)
    load_box(
        c.inputs.queries + slot * plan.query_bytes,
        c.queries_map,
        [Int32(0), row * plan.num_heads],
        full,
        EVICT_LAST,
    )
    load_bytes(
        c.inputs.weights.iterator + slot * plan.num_heads,
        c.weights.iterator + Int64(row) * plan.num_heads,
        plan.weight_bytes,
        full,
    )


def page_table(c: Producer, segment: Segment) -> Any:
    """Where the ids of the segment's pages are."""
    return c.block_table.iterator + (
        Int64(segment.row) * c.block_table.stride[0] + segment.first_page
    )


@cute.jit
def ask_for_ids(c: Producer, segment: Segment, lane: Int32) -> Int32:
    """The id of the segment's page with the lane's number."""
    ids = Int32(0)
    if lane < segment.num_pages:
        ids = (page_table(c, segment) + lane).load()
    return ids


@cute.jit
def load_pages(
    c: Producer,
    segment: Segment,
    first_ids: Int32,
    depth: Any,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """The segment's pages of this warp into the ring.

    Args:
        first_ids: of `ask_for_ids`.
        depth: pages in flight, in steps of 1 / DEPTH_STEPS; None: all that there are stages for.
    """
    count = segment.num_pages
    table = page_table(c, segment)
    ahead = first_ids  # this lane's page id of the next 32
    for block in cutlass.range(0, count, WARP_SIZE, unroll=1):
        ids = ahead
        if block + WARP_SIZE + lane < count:
            ahead = (table + block + WARP_SIZE + lane).load()
        # A warp loads for one warpgroup: pages whose number is its own, modulo the warpgroups.
        first = (c.warp - segment.first_number - block) & (plan.consumer_warpgroups - 1)
        stop = cutlass.min(count - block, Int32(WARP_SIZE))
        for i in cutlass.range(first, stop, plan.consumer_warpgroups, unroll=1):
            page = cute.arch.shuffle_sync(ids, i)
            load_page(c, page, segment.first_number + block + i, depth, lane, plan)


@cute.jit
def acquire_page(
    ring: RingProducer,
    number: Int32,
    state: PipelineState,
    depth: Any,
    plan: cutlass.Constexpr,
) -> None:
    """Wait until the stage of the CTA's page `number` is free, and no more than `depth` in flight.

    Of DEPTH_STEPS pages so many wait for a nearer one to be read, of the same warpgroup, that
    `depth` is met on average, and those are spread.
    """
    if const_expr(depth is not None):
        step = number // plan.consumer_warpgroups * SPREAD & (DEPTH_STEPS - 1)
        ahead = (depth + step) // DEPTH_STEPS
        nearer = number - plan.consumer_warpgroups * ahead
        if nearer >= 0 and ahead < plan.warp_stages:
            # page_empty: four warps have read it; the next page of its stage is not loaded yet.
            ring.wait_until_read(nearer)
    acquire_reused(ring, state, number)


@cute.jit
def load_page(
    c: Producer, page: Int32, number: Int32, depth: Any, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """One page into its stage; a page id outside the cache is passed on as invalid, not read."""
    ring = c.inputs.page_ring
    state = ring.state(number)
    stage = state.stage
    if lane == 0:
        acquire_page(ring, number, state, depth, plan)
        valid = page >= 0 and page < c.num_pages
        c.inputs.page_valid[stage] = Int32(1) if valid else Int32(0)
        if valid:
            full = ring.expect(stage)
            load_box(
                c.inputs.pages + stage * plan.stage_bytes,
                c.keys_map,
                [Int32(0), page * PAGE_ROWS],
                full,
                EVICT_FIRST,
            )
        else:
            ring.commit(stage)
