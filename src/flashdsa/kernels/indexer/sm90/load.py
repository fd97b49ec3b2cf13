"""The producer warp: finds the CTA's segments and keeps pages in flight."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.experimental import primitives as prims

from flashdsa.kernels.indexer.sm90.memory import Pipeline
from flashdsa.kernels.indexer.sm90.plan import PAGE_ROWS, SEGMENT_WORDS, WARP_SIZE
from flashdsa.kernels.indexer.sm90.schedule import (
    ROW,
    Rows,
    Schedule,
    describe_segment,
    make_schedule,
    padded_pages,
    pages_to_score,
    row_length,
)
from flashdsa.problem import PAGE_BYTES

EVICT_FIRST = 0x12F0000000000000
"""L2 policies as CUTLASS encodes them (TMA::CacheHintSm90)."""
EVICT_LAST = 0x14F0000000000000


class Producer(NamedTuple):
    """Role load. Owns page_full and segment_full, waits for page_empty and segment_empty."""

    pipeline: Pipeline
    keys_map: Any  # pointer to the pages' tensor map; None: only announce segments
    queries_map: Any  # likewise: of the rows' queries
    weights: Any  # (B, H) fp32, device memory
    block_table: Any  # (B, max_pages) int32, device memory
    num_pages: Int32  # pages of the cache
    rows: Rows


@cute.jit
def produce(c: Producer, lane: Int32, cta: Int32, num_ctas: Int32, plan: cutlass.Constexpr) -> None:
    """Load every segment of this CTA, then say that there are no more."""
    schedule = make_schedule(c.rows, num_ctas, lane, plan)
    cursor = cta * schedule.chunk
    end = cutlass.min(cursor + schedule.chunk, schedule.total)
    pages_done = Int32(0)
    segment = Int32(0)
    block = Int32(0)  # the 32 rows from here on, which begin at `block_start` on the line
    block_start = Int32(0)
    while cursor < end:
        row = block + lane
        pages = pages_to_score(c.rows, row, plan)
        share = padded_pages(pages, schedule.chunk, schedule.inverse, schedule.aligned)
        inclusive = share
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(inclusive, 1 << step, mask_and_clamp=0)
            if lane >= (1 << step):
                inclusive += other
        block_share = cute.arch.shuffle_sync(inclusive, WARP_SIZE - 1)
        if block_start + block_share <= cursor:
            block += WARP_SIZE
            block_start += block_share
        else:
            reaches = cute.arch.vote_ballot_sync(block_start + inclusive > cursor)
            found = Int32(31) - Int32(cute.arch.clz(reaches & (Int32(0) - reaches)))
            row = block + found
            start = block_start + cute.arch.shuffle_sync(inclusive - share, found)
            pages = cute.arch.shuffle_sync(pages, found)
            share = cute.arch.shuffle_sync(share, found)
            stop = cutlass.min(start + pages, end)
            load_segment_head(c, segment, row, start, cursor, pages, stop, schedule, lane, plan)
            if const_expr(c.keys_map is not None):
                load_pages(c, row, cursor - start, stop - cursor, pages_done, lane, plan)
            pages_done += stop - cursor
            segment += 1
            cursor = start + share
    slot = wait_for_segment_slot(c.pipeline, segment, plan)
    if lane == 0:
        c.pipeline.segments[slot * SEGMENT_WORDS + ROW] = Int32(-1)
        cute.arch.mbarrier_arrive(c.pipeline.segment_full + slot)
    cute.arch.sync_warp()


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
def load_segment_head(
    c: Producer,
    segment: Int32,
    row: Int32,
    start: Int32,
    begin: Int32,
    pages: Int32,
    stop: Int32,
    schedule: Schedule,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Description, queries and weights of a segment; segment_full completes with the last byte."""
    slot = wait_for_segment_slot(c.pipeline, segment, plan)
    length = row_length(c.rows, row)
    if lane == 0:
        describe_segment(
            c.pipeline.segments, slot, row, start, begin, pages, length, stop, schedule
        )
        # The arrival releases the description too: the same thread wrote it.
        if const_expr(c.queries_map is None):
            cute.arch.mbarrier_arrive(c.pipeline.segment_full + slot)
        else:
            load_query(c, slot, row, plan)
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


@cute.jit
def load_pages(
    c: Producer,
    row: Int32,
    first: Int32,
    count: Int32,
    pages_done: Int32,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Pages `first`... of the row into the ring; `pages_done` came before in this CTA."""
    table = c.block_table.iterator + (Int64(row) * c.block_table.stride[0] + first)
    ahead = Int32(0)  # this lane's page id of the next 32
    if lane < count:
        ahead = (table + lane).load()
    for block in cutlass.range(0, count, WARP_SIZE, unroll=1):
        ids = ahead
        if block + WARP_SIZE + lane < count:
            ahead = (table + block + WARP_SIZE + lane).load()
        for i in cutlass.range(cutlass.min(count - block, Int32(WARP_SIZE)), unroll=1):
            page = cute.arch.shuffle_sync(ids, i)
            load_page(c, page, pages_done + block + i, lane, plan)


@cute.jit
def load_page(
    c: Producer, page: Int32, number: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """One page into its stage; a page id outside the cache is passed on as invalid, not read."""
    stage = number % plan.stages
    turn = number // plan.stages
    if lane == 0:
        if turn > 0:
            cute.arch.mbarrier_wait(c.pipeline.page_empty + stage, (turn - 1) & 1)
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
