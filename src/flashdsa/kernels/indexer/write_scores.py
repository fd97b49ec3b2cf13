"""The scores-only kernel: which pages of which rows a CTA scores, computed on the device, and its
consumers, which score the pages of each tile and store the scores.

All pages of the rows lie on one line, row after row; the line is cut into chunks of equal length,
one a CTA. The part of a row inside a chunk is a work tile. Every row's share of the line is
rounded up to whole chunks, so that no CTA works on two rows, when the rows are so even that this
costs nearly nothing.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from flashdsa.dsl import gmem, static
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.warp import lowest_bit, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer import fused, load_tiles, score_batch, smem_views
from flashdsa.kernels.indexer.schedule import work_tile
from flashdsa.kernels.indexer.select.lists import PageRange, count_at
from flashdsa.kernels.indexer.select.sort_keys import INVALID, bin_of, sortable
from flashdsa.kernels.indexer.sizes import RANK_BINS, RANK_MANTISSA
from flashdsa.problem import PAGE_SIZE


class Partition(NamedTuple):
    """The cut of the line, the same in every CTA."""

    chunk: Int32  # pages of a CTA
    inverse: Float32  # of chunk
    aligned: Int32  # 1: rows begin at chunk boundaries
    total: Int32  # length of the line


@cute.jit
def make_partition(rows: work_tile.Rows, num_ctas: Int32, lane: Int32) -> Partition:
    """Cut the line; a whole warp calls."""
    total = Int32(0)
    longest = Int32(0)
    scored = Int32(0)
    for row in cutlass.range(lane, rows.count, WARP_SIZE, unroll=4):
        pages = work_tile.pages_to_score(rows, work_tile.row_length(rows, row))
        total += pages
        longest = cutlass.max(longest, pages)
        if pages > 0:
            scored += 1
    total = cute.arch.warp_redux_sync(total, "add")
    longest = cute.arch.warp_redux_sync(longest, "max")
    scored = cutlass.max(cute.arch.warp_redux_sync(scored, "add"), Int32(1))
    even = (total + num_ctas - 1) // num_ctas
    chunk = even
    aligned = Int32(0)
    ctas_each = num_ctas // scored
    if ctas_each > 0:
        own = (longest + ctas_each - 1) // ctas_each
        if own * 8 <= even * 9 + 16:
            chunk = own
            aligned = Int32(1)
    chunk = cutlass.max(chunk, Int32(1))
    inverse = Float32(1.0) / Float32(chunk)
    line = total
    if aligned == 1:
        padded = Int32(0)
        for row in cutlass.range(lane, rows.count, WARP_SIZE, unroll=4):
            pages = work_tile.pages_to_score(rows, work_tile.row_length(rows, row))
            padded += padded_pages(pages, chunk, inverse, aligned)
        line = cute.arch.warp_redux_sync(padded, "add")
    return Partition(chunk, inverse, aligned, line)


@cute.jit
def padded_pages(pages: Int32, chunk: Int32, inverse: Float32, aligned: Int32) -> Int32:
    """The row's share of the line."""
    share = pages
    if aligned == 1:
        share = work_tile.divide(pages + chunk - 1, chunk, inverse) * chunk
    return share


@cute.jit
def load_partition(
    ctx: load_tiles.LoadContext,
    loader: cutlass.Constexpr,
    lane: Int32,
    cta: Int32,
    num_ctas: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """A load warp: load every work tile of this CTA, then announce that no more come. loader: a
    TileLoader."""
    partition = make_partition(ctx.rows, num_ctas, lane)
    cursor = cta * partition.chunk
    end = cutlass.min(cursor + partition.chunk, partition.total)
    pages_done = Int32(0)
    number = Int32(0)
    block = Int32(0)  # the 32 rows from here on, which begin at `block_start` on the line
    block_start = Int32(0)
    while cursor < end:
        row = block + lane
        length = work_tile.row_length(ctx.rows, row)
        pages = work_tile.pages_to_score(ctx.rows, length)
        share = padded_pages(pages, partition.chunk, partition.inverse, partition.aligned)
        inclusive = prefix_sum(share, lane)
        block_share = cute.arch.shuffle_sync(inclusive, WARP_SIZE - 1)
        if block_start + block_share <= cursor:
            block += WARP_SIZE
            block_start += block_share
        else:
            # The row of at least one lane reaches beyond the cursor.
            reaches = cute.arch.vote_ballot_sync(block_start + inclusive > cursor)
            found = lowest_bit(reaches)
            row = block + found
            start = block_start + cute.arch.shuffle_sync(inclusive - share, found)
            pages = cute.arch.shuffle_sync(pages, found)
            share = cute.arch.shuffle_sync(share, found)
            stop = cutlass.min(start + pages, end)
            length = cute.arch.shuffle_sync(length, found)
            tile = work_tile.WorkTile(
                row, cursor - start, stop - cursor, length, Int32(1), pages_done
            )
            ids = loader.announce(ctx, number, tile, lane, plan)
            loader.load_pages(ctx, tile, ids, None, lane, plan)
            pages_done += work_tile.whole_stages(stop - cursor, plan)
            number += 1
            cursor = start + share
    loader.finish(ctx, number, lane, plan)


FILL_TOKENS = 1024
"""Scores of a row beyond its length that a warp fills at a time."""


def rows_to_score(
    seq_lens: cute.Tensor, block_table: cute.Tensor, max_len: Int32, of_entry: int = PAGE_SIZE
) -> work_tile.Rows:
    """The rows of a launch. One that is longer than the output is scored up to its width. of_entry:
    tokens that an entry of the table names."""
    longest = cutlass.min(block_table.shape[1] * of_entry, max_len)
    return work_tile.Rows(seq_lens, seq_lens.shape[0], longest)


class WriteContext(NamedTuple):
    """Role select of the scores-only kernel: waits for page_full and tile_full, arrives at
    page_empty and tile_empty."""

    inputs: smem_views.InputBuffers  # the consumer's end
    scores: Any  # (B, max_len) fp32, device memory
    max_len: Int32
    rows: work_tile.Rows
    bins: Any = None  # (teams * RANK_BINS,) Int32, shared memory: counts; None: no
    counts: Any = None  # (B * RANK_BINS,) Int32, device memory; (0,): not wanted


@cute.jit
def store_score(ctx: WriteContext, row: Int32, position: Int32, score: Float32) -> None:
    """Store one score of the output."""
    (ctx.scores.iterator + (Int64(row) * ctx.max_len + position)).store(score)


@cute.jit
def fill_beyond(ctx: WriteContext, warp: Int32, warps: Int32, lane: Int32) -> None:
    """Write -inf at and beyond every row's length; the caller is `warp` of the grid's `warps`."""
    blocks = (ctx.max_len + FILL_TOKENS - 1) // FILL_TOKENS
    for unit in cutlass.range(warp, ctx.rows.count * blocks, warps, unroll=1):
        row = unit // blocks
        begin = (unit - row * blocks) * FILL_TOKENS
        first = cutlass.max(work_tile.row_length(ctx.rows, row), begin)
        end = cutlass.min(begin + FILL_TOKENS, ctx.max_len)
        for position in cutlass.range(first + lane, end, WARP_SIZE, unroll=4):
            store_score(ctx, row, position, -Float32.inf)


@cute.jit
def consume_pages(
    ctx: WriteContext,
    caller: fused.Caller,
    memory: Memory,
    page_source: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Role select of the scores-only kernel: fill the rows' ends, then score the CTA's tiles.
    page_source: (memory, thread, plan) gives the PageSource of the calling thread."""
    # The last CTA takes the first rows: CTAs without pages, if any, have the highest numbers.
    fill_beyond(
        ctx,
        (caller.num_ctas - 1 - caller.cta) * plan.consumer_warps + caller.warp,
        caller.num_ctas * plan.consumer_warps,
        caller.lane,
    )
    write_scores(ctx, page_source(memory, caller.thread, plan), caller.thread, write_score, plan)


@cute.jit
def write_scores(
    ctx: WriteContext,
    source: score_batch.PageSource,
    thread: Int32,
    write: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Score every tile that the load warps announce. write: what `PageScoring.score_pages` calls,
    with an OutputSink."""
    number = Int32(0)
    tile = work_tile.wait_for_tile(ctx.inputs, number, plan)
    while tile.row >= 0:
        stage = ctx.inputs.tile_ring.state(number).stage
        pages = PageRange(
            stage, tile.first_page, tile.num_pages, tile.first_number, Int32(0), tile.num_pages
        )
        sink = sink_of(ctx, tile, thread, plan)
        scoring = source.scoring
        x = score_batch.Scoring(ctx.inputs, source.scorer, thread, static.Static(plan))
        if const_expr(plan.in_pairs):
            # All consumers: nobody reads the halved weights of the tile before.
            smem_views.consumer_sync(plan)
        prepared = scoring.prepare(x, stage)
        scoring.score_pages(x, prepared, pages, write, sink)
        if const_expr(ctx.bins is not None):
            if ctx.counts.shape[0] > 0:
                flush_counts(ctx, tile.row, thread, plan)
        # Orders the reads of the tile's weights before the copy that may overwrite them later.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if thread % WARP_SIZE == 0:
            # tile_empty[stage]: all lanes of this warp have read queries, weights and description.
            ctx.inputs.tile_ring.release(stage)
        number += 1
        tile = work_tile.wait_for_tile(ctx.inputs, number, plan)


@cute.jit
def flush_counts(
    ctx: WriteContext, tile_row: Int32, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """Add the tile's counts to its rows', and set them to 0. Starts and ends with a sync."""
    bins, counts = ctx.bins, ctx.counts
    smem_views.consumer_sync(plan)  # all scores of the tile are counted
    for i in cutlass.range_constexpr(plan.teams * RANK_BINS // plan.consumer_threads):
        at = thread + i * plan.consumer_threads
        row = tile_row * plan.teams + i // (RANK_BINS // plan.consumer_threads)
        count = bins[at]
        bins[at] = Int32(0)
        # Nobody would set the counts of a row without scores to 0.
        if count > 0 and work_tile.row_length(ctx.rows, row) > ctx.rows.unscored:
            at_row = Int64(row) * RANK_BINS + at % RANK_BINS
            gmem.add_relaxed(counts.iterator + at_row, count)
    smem_views.consumer_sync(plan)  # all counts are 0


class OutputSink(NamedTuple):
    """Destination of a lane's scores of a tile."""

    ctx: WriteContext
    row: Int32
    length: Int32  # of the row, in tokens
    first_bin: Int32  # of the row, in the tile's counts


@cute.jit
def sink_of(
    ctx: WriteContext, tile: work_tile.WorkTile, thread: Int32, plan: cutlass.Constexpr
) -> OutputSink:
    """The destination of the caller's scores."""
    row, length, first_bin = tile.row, tile.length, Int32(0)
    if const_expr(plan.in_pairs):
        second = score_batch.row_of_lane(thread % WARP_SIZE)
        row, first_bin = 2 * tile.row + second, second * RANK_BINS
        length = work_tile.row_length(ctx.rows, row)
    return OutputSink(ctx, row, length, first_bin)


@cute.jit
def write_score(
    sink: OutputSink,
    score: Float32,
    position: Int32,
    valid: cutlass.Boolean,
    present: cutlass.Boolean,
) -> None:
    """Write a score to its position in the row; -inf if its page id is outside the cache."""
    if not valid:
        score = -Float32.inf
    if present and position < sink.length:
        store_score(sink.ctx, sink.row, position, score)


@cute.jit
def write_ranked(
    sink: OutputSink,
    score: Float32,
    position: Int32,
    valid: cutlass.Boolean,
    present: cutlass.Boolean,
) -> None:
    """Write a score to its position in the row, and count it; the word `INVALID` if its page id is
    outside the cache."""
    if present and position < sink.length:
        word = score.bitcast(Int32) if valid else Int32(INVALID)
        store_score(sink.ctx, sink.row, position, word.bitcast(Float32))
        if valid and sink.ctx.counts.shape[0] > 0:
            count_at(sink.ctx.bins, sink.first_bin + bin_of(sortable(score), RANK_MANTISSA))
