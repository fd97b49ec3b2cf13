"""The consumers of the scores-only kernel: score the pages of each tile and store the scores."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.schedule.work_tile import Rows, WorkTile, row_length, wait_for_tile
from flashdsa.kernels.indexer.sm90.score import (
    PageSpan,
    Scorer,
    load_weights,
    make_scorer,
    score_span,
)
from flashdsa.kernels.indexer.smem_views import InputBuffers
from flashdsa.problem import PAGE_SIZE

FILL_TOKENS = 1024
"""Scores of a row beyond its length that a warp fills at a time."""


class WriteContext(NamedTuple):
    """Role select of the scores-only kernel: waits for page_full and tile_full, arrives at
    page_empty and tile_empty."""

    inputs: InputBuffers  # the consumer's end
    scores: Any  # (B, max_len) fp32, device memory
    max_len: Int32
    rows: Rows


@cute.jit
def store_score(ctx: WriteContext, row: Int32, position: Int32, score: Float32) -> None:
    """One score of the output."""
    (ctx.scores.iterator + (Int64(row) * ctx.max_len + position)).store(score)


@cute.jit
def fill_beyond(ctx: WriteContext, warp: Int32, warps: Int32, lane: Int32) -> None:
    """-inf at and beyond every row's length; the caller is `warp` of the grid's `warps`."""
    blocks = (ctx.max_len + FILL_TOKENS - 1) // FILL_TOKENS
    for unit in cutlass.range(warp, ctx.rows.count * blocks, warps, unroll=1):
        row = unit // blocks
        begin = (unit - row * blocks) * FILL_TOKENS
        first = cutlass.max(row_length(ctx.rows, row), begin)
        end = cutlass.min(begin + FILL_TOKENS, ctx.max_len)
        for position in cutlass.range(first + lane, end, WARP_SIZE, unroll=4):
            store_score(ctx, row, position, -Float32.inf)


@cute.jit
def write_scores(ctx: WriteContext, thread: Int32, plan: cutlass.Constexpr) -> None:
    """Score every tile that the load warps announce."""
    lane = thread % WARP_SIZE
    scorer = make_scorer(ctx.inputs.pages, ctx.inputs.queries, thread, plan)
    weights = cute.make_rmem_tensor(plan.num_heads // 4, Float32)
    number = Int32(0)
    tile = wait_for_tile(ctx.inputs, number, plan)
    while tile.row >= 0:
        stage = ctx.inputs.tile_ring.state(number).stage
        load_weights(weights, ctx.inputs.weights, stage, lane, plan)
        write_tile_scores(ctx, scorer, weights, tile, stage, thread, plan)
        cute.arch.sync_warp()
        if lane == 0:
            # tile_empty[stage]: all lanes of this warp have read queries, weights and description.
            ctx.inputs.tile_ring.release(stage)
        number += 1
        tile = wait_for_tile(ctx.inputs, number, plan)


@cute.jit
def write_tile_scores(
    ctx: WriteContext,
    scorer: Scorer,
    weights: cute.Tensor,
    tile: WorkTile,
    stage: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Scores of this warpgroup's pages: those whose number is its own, modulo warpgroups."""
    group = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
    groups = plan.consumer_warpgroups
    first = (group - tile.first_number) & (groups - 1)
    span = PageSpan(
        count=cutlass.max(tile.num_pages - first + groups - 1, Int32(0)) // groups,
        first_number=tile.first_number + first,
        first_position=(tile.first_page + first) * PAGE_SIZE,
        tile_stage=stage,
    )
    sink = OutputSink(ctx, tile.row, tile.length)
    score_span(ctx.inputs, scorer, weights, span, thread, write_score, sink, plan)


class OutputSink(NamedTuple):
    """Where the scores of a tile go."""

    ctx: WriteContext
    row: Int32
    length: Int32  # of the row, in tokens


@cute.jit
def write_score(
    sink: OutputSink,
    score: Float32,
    position: Int32,
    valid: cutlass.Boolean,
    present: cutlass.Boolean,
) -> None:
    """A score to its position in the row; -inf if its page id is outside the cache."""
    if not valid:
        score = -Float32.inf
    if present and position < sink.length:
        store_score(sink.ctx, sink.row, position, score)
