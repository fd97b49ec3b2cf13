"""The consumers of the scores-only kernel: score the pages of each tile and store the scores."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from flashdsa.dsl.static import Static
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import consumer_sync
from flashdsa.kernels.indexer.fused import Caller
from flashdsa.kernels.indexer.schedule.work_tile import Rows, WorkTile, row_length, wait_for_tile
from flashdsa.kernels.indexer.score_batch import PageSource, Scoring
from flashdsa.kernels.indexer.score_together import row_of_lane
from flashdsa.kernels.indexer.select.keys import INVALID
from flashdsa.kernels.indexer.select.lists import PageRange
from flashdsa.kernels.indexer.smem_views import IndexerMemory, InputBuffers
from flashdsa.problem import PAGE_SIZE

FILL_TOKENS = 1024
"""Scores of a row beyond its length that a warp fills at a time."""


def rows_to_score(
    seq_lens: cute.Tensor, block_table: cute.Tensor, max_len: Int32, of_entry: int = PAGE_SIZE
) -> Rows:
    """The rows of a launch. One that is longer than the output is scored up to its width.

    Args:
        of_entry: tokens that an entry of the table names.
    """
    longest = cutlass.min(block_table.shape[1] * of_entry, max_len)
    return Rows(seq_lens, seq_lens.shape[0], longest)


class WriteContext(NamedTuple):
    """Role select of the scores-only kernel: waits for page_full and tile_full, arrives at
    page_empty and tile_empty."""

    inputs: InputBuffers  # the consumer's end
    scores: Any  # (B, max_len) fp32, device memory
    max_len: Int32
    rows: Rows


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
        first = cutlass.max(row_length(ctx.rows, row), begin)
        end = cutlass.min(begin + FILL_TOKENS, ctx.max_len)
        for position in cutlass.range(first + lane, end, WARP_SIZE, unroll=4):
            store_score(ctx, row, position, -Float32.inf)


@cute.jit
def consume_pages(
    ctx: WriteContext,
    caller: Caller,
    memory: IndexerMemory,
    page_source: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Role select of the scores-only kernel: fill the rows' ends, then score the CTA's tiles.

    Args:
        page_source: (memory, thread, plan) gives the PageSource of the calling thread.
    """
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
    source: PageSource,
    thread: Int32,
    write: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> None:
    """Score every tile that the load warps announce.

    Args:
        write: what `PageScoring.score_pages` calls, with an OutputSink.
    """
    number = Int32(0)
    tile = wait_for_tile(ctx.inputs, number, plan)
    while tile.row >= 0:
        stage = ctx.inputs.tile_ring.state(number).stage
        pages = PageRange(
            stage, tile.first_page, tile.num_pages, tile.first_number, Int32(0), tile.num_pages
        )
        sink = sink_of(ctx, tile, thread, plan)
        scoring = source.scoring
        x = Scoring(ctx.inputs, source.scorer, thread, Static(plan))
        if const_expr(plan.teams > 1):
            # All consumers: nobody reads the halved weights of the tile before.
            consumer_sync(plan)
        prepared = scoring.prepare(x, stage)
        scoring.score_pages(x, prepared, pages, write, sink)
        # Orders the reads of the tile's weights before the copy that may overwrite them later.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if thread % WARP_SIZE == 0:
            # tile_empty[stage]: all lanes of this warp have read queries, weights and description.
            ctx.inputs.tile_ring.release(stage)
        number += 1
        tile = wait_for_tile(ctx.inputs, number, plan)


class OutputSink(NamedTuple):
    """Destination of a lane's scores of a tile."""

    ctx: WriteContext
    row: Int32
    length: Int32  # of the row, in tokens
    slot: Int32  # of no use here: what scores of rows in pairs pass on


@cute.jit
def sink_of(
    ctx: WriteContext, tile: WorkTile, thread: Int32, plan: cutlass.Constexpr
) -> OutputSink:
    """The destination of the caller's scores."""
    row, length = tile.row, tile.length
    if const_expr(plan.teams > 1):
        row = 2 * tile.row + row_of_lane(thread % WARP_SIZE)
        length = row_length(ctx.rows, row)
    return OutputSink(ctx, row, length, Int32(0))


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
def write_of_pair(
    sink: OutputSink, slot: Int32, score: Float32, position: Int32, valid: cutlass.Boolean
) -> Int32:
    """Same as `write_score` for a lane's row of a pair; `INVALID` if the page id is outside the
    cache."""
    if not valid:
        score = Int32(INVALID).bitcast(Float32)
    if position < sink.length:
        store_score(sink.ctx, sink.row, position, score)
    return slot
