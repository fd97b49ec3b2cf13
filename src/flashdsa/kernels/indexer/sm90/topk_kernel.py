"""Exact top-k of given scores, for Hopper: the fused indexer's selection without its scoring.

load warp  | 4 consumer warpgroups
---------- | -----------------------------------------------------------------
           | rows of at most topk scores: all positions
work tiles | append (key, position), histogram; the row's threshold; positions
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from flashdsa.dsl.cluster import enter_cluster
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.dsl.gmem import prefetch
from flashdsa.dsl.pipeline import RingConsumer, RingProducer
from flashdsa.dsl.static import Static
from flashdsa.hw import SM90, WARP_SIZE
from flashdsa.kernels.indexer.emit import Output, emit_unscored_rows
from flashdsa.kernels.indexer.launch import launch_shape, rows_apart
from flashdsa.kernels.indexer.load_tiles import load_scheduled
from flashdsa.kernels.indexer.schedule.row_schedule import first_lengths, schedule_rows
from flashdsa.kernels.indexer.schedule.work_tile import Rows, WorkTile, find_coord, rows_of
from flashdsa.kernels.indexer.select.keys import INVALID, LOWEST_KEY, bin_of, sortable
from flashdsa.kernels.indexer.select.lists import Listed, count_in_bin
from flashdsa.kernels.indexer.select.tiles import select_by_cluster, select_tiles
from flashdsa.kernels.indexer.sizes import INITIALISING_WARPS
from flashdsa.kernels.indexer.sm90.kernel import DESCRIPTIONS, LoadContext
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.kernels.indexer.smem_views import (
    IndexerMemory,
    Scratch,
    SelectBuffers,
    Selecting,
    cluster_buffers_in,
    consumer_sync,
    select_buffers_in,
    tile_buffers_in,
)
from flashdsa.problem import PAGE_SIZE


@cute.jit
def rank_scores(
    memory: IndexerMemory,
    output: Output,
    source: Any,
    fill: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """All threads of a CTA: its tiles of the output's rows, one cluster's each. source, fill: see
    select/tiles.py."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane, rows = thread % WARP_SIZE, output.rows
    select, cluster = select_buffers_in(memory, plan), cluster_buffers_in(memory, plan)
    coord = find_coord(rows, plan)
    consumes = warp < plan.consumer_warps
    lengths = first_lengths(select, rows, coord, thread, consumes, plan)
    enter_cluster(memory, thread, INITIALISING_WARPS)
    coord = schedule_rows(select, rows, coord, lengths, thread, consumes, plan)
    if consumes:
        # The last CTA takes the first rows: CTAs without tiles, if any, have the highest numbers.
        emit_unscored_rows(
            output,
            (num_ctas - 1 - cta) * plan.consumer_warps + warp,
            num_ctas * plan.consumer_warps,
            lane,
            plan,
        )
        inputs = tile_buffers_in(memory, plan, RingConsumer)
        if const_expr(plan.of_cache):
            # The launch that scores, which this one may follow early, has ended.
            cute.arch.griddepcontrol_wait()
        s = Selecting(inputs, select, cluster, coord, output, None, thread, Static(plan))
        select_tiles(s, source, fill, select_by_cluster)
    else:
        inputs = tile_buffers_in(memory, plan, RingProducer)
        load_warp = warp - plan.consumer_warps
        load_ctx = LoadContext(inputs, None, None, None, None, Int32(0), rows, load_warp)
        cute.arch.cluster_wait()  # here for the same reason as in the fused kernel
        load_scheduled(load_ctx, DESCRIPTIONS, select, coord, lengths, lane, plan)


PREFETCHED = 1 << 16
"""Scores that are on their way into the second-level cache before they are read."""
LINE_SCORES = 32
"""Scores of a cache line."""


@cute.jit
def prefetch_scores(
    scores: Any, row: Int32, begin: Int32, end: Int32, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """Start to bring the row's scores from `begin` on into the second-level cache."""
    line = scores.iterator + Int64(row) * scores.stride[0]
    step = plan.consumer_threads * LINE_SCORES
    for at in cutlass.range(begin + thread * LINE_SCORES, end, step, unroll=1):
        prefetch(line + at)


@cute.jit
def load_block(
    values: cute.Tensor, line: Any, first: Int32, end: Int32, plan: cutlass.Constexpr
) -> None:
    """Load this thread's scores of a block: `first`, and every consumer_threads-th one before
    `end`."""
    for i in cutlass.range_constexpr(plan.read_together):
        position = first + i * plan.consumer_threads
        values[i] = Float32(0.0)
        if position < end:
            values[i] = (line + position).load()


@cute.jit
def read_batch(s: Selecting, scores: Any, tile: WorkTile, stage: Int32, listed: Listed) -> Listed:
    """Add scores of the tile while the list has room for another block. The list has room for a
    block at the start; see `refill_pages`. scores: (B, max_len) fp32 in device memory, any distance
    between rows; 64 of them count as a page."""
    select, thread, plan = s.select, s.thread, s.plan
    block = plan.read_together * plan.consumer_threads
    entries, floor = listed.entries, listed.floor
    lowest = floor
    if const_expr(plan.of_cache):
        lowest = cutlass.max(floor, Uint32(LOWEST_KEY))
    row = tile.row
    line = scores.iterator + Int64(row) * scores.stride[0]
    last = cutlass.min((tile.first_page + tile.num_pages) * PAGE_SIZE, tile.length)
    begin = (tile.first_page + listed.pages) * PAGE_SIZE
    if listed.pages == 0:
        prefetch_scores(scores, row, begin, cutlass.min(begin + PREFETCHED, last), thread, plan)
    most = Int32(plan.lists.capacity)
    if floor == 0 and last - begin > most:
        most = Int32(plan.lists.first_fill_pages * PAGE_SIZE)
    values = cute.make_rmem_tensor(plan.read_together, Float32)
    keys = cute.make_rmem_tensor(plan.read_together, Uint32)
    load_block(values, line, begin + thread, last, plan)
    reads = cutlass.Boolean(True)
    while reads:
        for i in cutlass.range_constexpr(plan.read_together):
            keys[i] = key_of_given(values[i], plan)
        # The next block is on its way, into registers that are free now, while this one is added.
        load_block(values, line, begin + block + thread, last, plan)
        ahead = begin + PREFETCHED
        prefetch_scores(scores, row, ahead, cutlass.min(ahead + block, last), thread, plan)
        append_keys(select, keys, begin + thread, last, lowest, plan)
        begin += block
        # All consumers: every entry of the block is in the list, and counted.
        consumer_sync(plan)
        entries = select.scratch[Scratch.COUNT]
        consumer_sync(plan)  # everyone has read the count, so that it may be written again
        reads = begin < last and most - entries >= block
    stop = cutlass.min(begin // PAGE_SIZE - tile.first_page, tile.num_pages)
    return Listed(entries, stop, floor)


@cute.jit
def key_of_given(score: Float32, plan: cutlass.Constexpr) -> Uint32:
    """The score's key; 0 of a token of a page that the cache does not have."""
    key = sortable(score)
    if const_expr(plan.of_cache):
        if score.bitcast(Int32) == INVALID:
            key = Uint32(0)
    return key


@cute.jit
def append_keys(
    select: SelectBuffers,
    keys: cute.Tensor,
    first: Int32,
    end: Int32,
    floor: Uint32,
    plan: cutlass.Constexpr,
) -> None:
    """Append the keys of positions `first` and every consumer_threads-th one, with one atomic a
    warp."""
    masks = cute.make_rmem_tensor(plan.read_together, Int32)
    total = Int32(0)
    for i in cutlass.range_constexpr(plan.read_together):
        wanted = first + i * plan.consumer_threads < end and keys[i] >= floor
        masks[i] = Int32(cute.arch.vote_ballot_sync(wanted))
        total += Int32(cute.arch.popc(masks[i]))
    if total > 0:
        lane = cute.arch.lane_idx()
        slot = Int32(0)
        if lane == 0:
            slot = cute.arch.atomic_add(
                select.scratch.iterator + Scratch.COUNT, total, sem="relaxed", scope="cta"
            )
        slot = cute.arch.shuffle_sync(slot, 0)
        below = Int32(cute.arch.lanemask_lt())
        for i in cutlass.range_constexpr(plan.read_together):
            if (masks[i] >> lane) & 1 == 1:
                index = slot + Int32(cute.arch.popc(masks[i] & below))
                select.keys[index] = Int32(keys[i])
                select.positions[index] = first + i * plan.consumer_threads
                count_in_bin(select, bin_of(keys[i]))
            slot += Int32(cute.arch.popc(masks[i]))


@cute.kernel
def topk_kernel(
    scores: cute.Tensor, lengths: cute.Tensor, positions: cute.Tensor, plan: cutlass.Constexpr
):
    """One CTA of the grid; arguments as in `launch_topk`."""
    memory = IndexerMemory.allocate(plan)
    rows = Rows(lengths, lengths.shape[0], scores.shape[1])
    rank_scores(memory, Output(positions, None, None, Int32(0), rows), scores, read_batch, plan)


@cute.kernel
def cached_topk_kernel(
    scores: cute.Tensor,
    lengths: cute.Tensor,
    block_table: cute.Tensor,
    num_pages: Int32,
    topk_indices: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_cached_topk`."""
    memory = IndexerMemory.allocate(plan)
    rows = rows_of(lengths, block_table)
    id_table = None if const_expr(plan.positions) else block_table
    output = Output(topk_indices, block_table, id_table, num_pages, rows)
    rank_scores(memory, output, scores, read_batch, plan)


@cute.jit
def launch_topk(
    plan: cutlass.Constexpr,
    stream: Any,
    scores: cute.Tensor,
    lengths: cute.Tensor,
    positions: cute.Tensor,
    num_clusters: Int32,
    cluster_size: Int32,
):
    """Launch on `stream`.

    Args:
        scores: (B, max_len) fp32, any distance between rows. lengths: (B,) int32.
        positions: (B, topk) int32, written.
        num_clusters, cluster_size: as in `launch_indexer`.
    """
    topk_kernel(scores, lengths, positions, plan).launch(
        **launch_shape(num_clusters, cluster_size, plan), stream=stream
    )


@cute.jit
def launch_cached_topk(
    plan: cutlass.Constexpr,
    stream: Any,
    scores: cute.Tensor,
    lengths: cute.Tensor,
    block_table: cute.Tensor,
    num_pages: Int32,
    topk_indices: cute.Tensor,
    num_clusters: Int32,
    cluster_size: Int32,
):
    """Launch on `stream`, early: before the launch before it, which writes the scores and nothing
    else that this one reads, has ended. Other arguments as in `launch_topk`.

    Args:
        block_table: (B / next_n, max_pages) int32, any distance between rows; no row of scores is
            shorter than its pages. num_pages: of the cache.
        topk_indices: (B, topk) int32, written.
    """
    cached_topk_kernel(scores, lengths, block_table, num_pages, topk_indices, plan).launch(
        **launch_shape(num_clusters, cluster_size, plan), stream=stream, use_pdl=True
    )


def compile_topk(plan: TopkPlan) -> Any:
    """Compile `launch_topk`, or `launch_cached_topk`."""
    rows, width, requests, table = (cute.sym_int32() for _ in range(4))
    cache = (rows_apart(Int32, requests, table), Int32(1)) if plan.of_cache else ()
    return compile_launch(
        SM90,
        launch_cached_topk if plan.of_cache else launch_topk,
        plan,
        rows_apart(Float32, rows, width),
        fake_tensor(Int32, (rows,), WORD_ALIGNMENT),
        *cache,
        fake_tensor(Int32, (rows, plan.topk), WORD_ALIGNMENT),
        Int32(1),
        Int32(1),
    )
