"""The producer warp's work on a segment: announce it and keep its pages in flight."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.experimental import primitives as prims

from flashdsa.kernels.indexer.sm90.memory import Pipeline
from flashdsa.kernels.indexer.sm90.plan import DEPTH_STEPS, PAGE_ROWS, WARP_SIZE, IndexerPlan
from flashdsa.kernels.indexer.sm90.segments import Rows, Segment, write_segment_words
from flashdsa.problem import PAGE_BYTES

EVICT_FIRST = 0x12F0000000000000
"""L2 policies as CUTLASS encodes them (TMA::CacheHintSm90)."""
EVICT_LAST = 0x14F0000000000000
SPREAD = 5
"""Multiples of it, modulo DEPTH_STEPS, are all steps, and neighbouring ones are far apart."""


class Producer(NamedTuple):
    """Role load. Owns page_full and segment_full, waits for page_empty and segment_empty."""

    pipeline: Pipeline
    keys_map: Any  # pointer to the pages' tensor map; None: only announce segments
    queries_map: Any  # likewise: of the rows' queries
    weights: Any  # (B, H) fp32, device memory
    block_table: Any  # (B, max_pages) int32, device memory
    num_pages: Int32  # pages of the cache
    rows: Rows
    warp: Int32  # among the role's; the first one announces segments


@cute.jit
def wait_for_segment_slot(pipeline: Pipeline, segment: Int32, plan: cutlass.Constexpr) -> Int32:
    """The segment's slot, once the consumers have left it."""
    slot = segment % plan.segment_stages
    if segment >= plan.segment_stages:
        cute.arch.mbarrier_wait(
            pipeline.segment_empty + slot, (segment // plan.segment_stages - 1) & 1
        )
    return slot


@cute.jit
def announce(
    c: Producer, number: Int32, segment: Segment, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Description, queries and weights of a segment; segment_full completes with the last byte."""
    if c.warp == 0:
        slot = wait_for_segment_slot(c.pipeline, number, plan)
        if lane == 0:
            announce_in(c, slot, segment, plan)
    cute.arch.sync_warp()


@cute.jit
def announce_in(c: Producer, slot: Int32, segment: Segment, plan: cutlass.Constexpr) -> None:
    """One thread: the description and the copies into a free slot."""
    write_segment_words(c.pipeline.segments, slot, segment)
    # The arrival releases the description too: the same thread wrote it.
    if const_expr(c.queries_map is None):
        cute.arch.mbarrier_arrive(c.pipeline.segment_full + slot)
    else:
        load_query(c, slot, segment.row, plan)


@cute.jit
def finish(c: Producer, number: Int32, lane: Int32, plan: cutlass.Constexpr) -> None:
    """Say that no segment comes any more."""
    if c.warp == 0:
        slot = wait_for_segment_slot(c.pipeline, number, plan)
        if lane == 0:
            nothing = Segment(Int32(-1), *(Int32(0) for _ in Segment._fields[1:]))
            write_segment_words(c.pipeline.segments, slot, nothing)
            cute.arch.mbarrier_arrive(c.pipeline.segment_full + slot)
    cute.arch.sync_warp()


@cute.jit
def load_query(c: Producer, slot: Int32, row: Int32, plan: cutlass.Constexpr) -> None:
    """Arrive at segment_full and start the copies of the row's queries and weights."""
    barrier = c.pipeline.segment_full + slot
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, plan.query_bytes + plan.weight_bytes)
    prims.cp_async_bulk_tensor_shared_cluster_global(
        (c.pipeline.queries + slot * plan.query_bytes).to_llvm_ptr(),
        c.queries_map,
        [Int32(0), row * plan.num_heads],
        barrier.to_llvm_ptr(),
        [],
        l2_cache_hint=Int64(EVICT_LAST),
    )
    prims.cp_async_bulk_shared_cluster_global(
        (c.pipeline.weights.iterator + slot * plan.num_heads).to_llvm_ptr(),
        (c.weights.iterator + Int64(row) * plan.num_heads).to_llvm_ptr(),
        barrier.to_llvm_ptr(),
        plan.weight_bytes,
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
def wait_for_page_slot(
    pipeline: Pipeline, number: Int32, depth: Any, plan: cutlass.Constexpr
) -> None:
    """Until the stage of the CTA's page `number` is free, and no more than `depth` in flight.

    Of DEPTH_STEPS pages so many wait for a nearer one to be read, of the same warpgroup, that
    `depth` is met on average, and those are spread.
    """
    if const_expr(depth is not None):
        step = number // plan.consumer_warpgroups * SPREAD & (DEPTH_STEPS - 1)
        ahead = (depth + step) // DEPTH_STEPS
        nearer = number - plan.consumer_warpgroups * ahead
        if nearer >= 0 and ahead < plan.warp_stages:
            wait_until_read(pipeline, nearer, plan)
    if number >= plan.ring_stages:
        wait_until_read(pipeline, number - plan.ring_stages, plan)


def wait_until_read(pipeline: Pipeline, number: Int32, plan: IndexerPlan) -> None:
    """page_empty: four warps have read the CTA's page `number`; the next one of its stage is not
    loaded yet."""
    stage = number % plan.ring_stages
    cute.arch.mbarrier_wait(pipeline.page_empty + stage, (number // plan.ring_stages) & 1)


@cute.jit
def load_page(
    c: Producer, page: Int32, number: Int32, depth: Any, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """One page into its stage; a page id outside the cache is passed on as invalid, not read."""
    stage = number % plan.ring_stages
    if lane == 0:
        wait_for_page_slot(c.pipeline, number, depth, plan)
        valid = page >= 0 and page < c.num_pages
        c.pipeline.page_valid[stage] = Int32(1) if valid else Int32(0)
        barrier = c.pipeline.page_full + stage
        if valid:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, PAGE_BYTES)
            prims.cp_async_bulk_tensor_shared_cluster_global(
                (c.pipeline.pages + stage * plan.stage_bytes).to_llvm_ptr(),
                c.keys_map,
                [Int32(0), page * PAGE_ROWS],
                barrier.to_llvm_ptr(),
                [],
                l2_cache_hint=Int64(EVICT_FIRST),
            )
        else:
            cute.arch.mbarrier_arrive(barrier)
