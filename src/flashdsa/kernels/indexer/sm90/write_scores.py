"""The consumers of the scores-only kernel: score the pages of each segment and store the scores."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.kernels.indexer.sm90.memory import Pipeline
from flashdsa.kernels.indexer.sm90.plan import SEGMENT_WORDS, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.sm90.schedule import (
    FIRST_PAGE,
    LENGTH,
    NUM_PAGES,
    ROW,
    Rows,
    row_length,
)
from flashdsa.kernels.indexer.sm90.score import (
    Scorer,
    issue,
    load_scale,
    load_weights,
    make_scorer,
    reduce_heads,
    token_of_lane,
)
from flashdsa.problem import PAGE_SIZE

FILL_TOKENS = 1024
"""Slots of a row beyond its length that a warp fills at a time."""


class Writer(NamedTuple):
    """Role write. Waits for page_full and segment_full; releases page_empty and segment_empty."""

    pipeline: Pipeline
    scores: Any  # (B, max_len) fp32, device memory
    max_len: Int32
    rows: Rows


@cute.jit
def store_score(c: Writer, row: Int32, position: Int32, score: Float32) -> None:
    """One slot of the output."""
    (c.scores.iterator + (Int64(row) * c.max_len + position)).store(score)


@cute.jit
def fill_beyond(c: Writer, warp: Int32, warps: Int32, lane: Int32) -> None:
    """-inf into every slot at or beyond its row's length; `warp` is one of `warps` of the grid."""
    blocks = (c.max_len + FILL_TOKENS - 1) // FILL_TOKENS
    for unit in cutlass.range(warp, c.rows.count * blocks, warps, unroll=1):
        row = unit // blocks
        begin = (unit - row * blocks) * FILL_TOKENS
        first = cutlass.max(row_length(c.rows, row), begin)
        end = cutlass.min(begin + FILL_TOKENS, c.max_len)
        for position in cutlass.range(first + lane, end, WARP_SIZE, unroll=4):
            store_score(c, row, position, -Float32.inf)


@cute.jit
def write_scores(c: Writer, thread: Int32, plan: cutlass.Constexpr) -> None:
    """Score every segment that the producer announces."""
    lane = thread % WARP_SIZE
    scorer = make_scorer(c.pipeline.pages, c.pipeline.queries, thread, plan)
    weights = cute.make_rmem_tensor(plan.num_heads // 4, Float32)
    pages_done = Int32(0)
    segment = Int32(0)
    row = wait_for_segment(c.pipeline, segment, plan)
    while row >= 0:
        slot = segment % plan.segment_stages
        load_weights(weights, c.pipeline.weights, slot, lane, plan)
        pages = c.pipeline.segments[slot * SEGMENT_WORDS + NUM_PAGES]
        write_segment(c, scorer, weights, row, slot, pages_done, thread, plan)
        # All lanes have read queries, weights and description: the slot may be refilled.
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(c.pipeline.segment_empty + slot)
        pages_done += pages
        segment += 1
        row = wait_for_segment(c.pipeline, segment, plan)


@cute.jit
def wait_for_segment(pipeline: Pipeline, segment: Int32, plan: cutlass.Constexpr) -> Int32:
    """The segment's row once it is announced, -1 behind the last one."""
    slot = segment % plan.segment_stages
    cute.arch.mbarrier_wait(pipeline.segment_full + slot, (segment // plan.segment_stages) & 1)
    return pipeline.segments[slot * SEGMENT_WORDS + ROW]


@cute.jit
def write_segment(
    c: Writer,
    scorer: Scorer,
    weights: cute.Tensor,
    row: Int32,
    slot: Int32,
    pages_done: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Scores of this warpgroup's pages: those whose number is its own, modulo warpgroups."""
    lane = thread % WARP_SIZE
    token = token_of_lane(thread // WARP_SIZE, lane)
    words = slot * SEGMENT_WORDS
    first = c.pipeline.segments[words + FIRST_PAGE]
    count = c.pipeline.segments[words + NUM_PAGES]
    length = c.pipeline.segments[words + LENGTH]
    skip = (thread // WARPGROUP_SIZE - pages_done) & (plan.consumer_warpgroups - 1)
    for page in cutlass.range(skip, count, plan.consumer_warpgroups, unroll=1):
        number = pages_done + page
        stage = number % plan.stages
        # page_full[stage]: keys and scales are there, or page_valid says that none are.
        cute.arch.mbarrier_wait(c.pipeline.page_full + stage, (number // plan.stages) & 1)
        issue(scorer, stage, slot)
        scale = load_scale(scorer, stage, token, plan)
        valid = c.pipeline.page_valid[stage]
        warpgroup.wait_group(0)
        # All reads of the stage are done in this warp; four warps make it empty.
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(c.pipeline.page_empty + stage)
        score = reduce_heads(scorer, weights, scale, lane, plan)
        if valid == 0:
            score = -Float32.inf
        position = (first + page) * PAGE_SIZE + token
        if lane % 4 < 2 and position < length:
            store_score(c, row, position, score)
