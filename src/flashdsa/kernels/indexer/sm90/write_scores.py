"""The consumers of the scores-only kernel: score the pages of each segment and store the scores."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.sm90.memory import Inputs
from flashdsa.kernels.indexer.sm90.score import (
    Scorer,
    Span,
    load_weights,
    make_scorer,
    score_span,
)
from flashdsa.kernels.indexer.sm90.segments import Rows, Segment, row_length, wait_for_segment
from flashdsa.problem import PAGE_SIZE

FILL_TOKENS = 1024
"""Slots of a row beyond its length that a warp fills at a time."""


class Writer(NamedTuple):
    """Role write. Waits for page_full and segment_full; releases page_empty and segment_empty."""

    inputs: Inputs
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
    scorer = make_scorer(c.inputs.pages, c.inputs.queries, thread, plan)
    weights = cute.make_rmem_tensor(plan.num_heads // 4, Float32)
    number = Int32(0)
    segment = wait_for_segment(c.inputs, number, plan)
    while segment.row >= 0:
        slot = number % plan.segment_stages
        load_weights(weights, c.inputs.weights, slot, lane, plan)
        write_segment(c, scorer, weights, segment, slot, thread, plan)
        # All lanes have read queries, weights and description: the slot may be refilled.
        cute.arch.sync_warp()
        if lane == 0:
            c.inputs.segment_ring.release(slot)
        number += 1
        segment = wait_for_segment(c.inputs, number, plan)


@cute.jit
def write_segment(
    c: Writer,
    scorer: Scorer,
    weights: cute.Tensor,
    segment: Segment,
    slot: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Scores of this warpgroup's pages: those whose number is its own, modulo warpgroups."""
    group = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
    groups = plan.consumer_warpgroups
    first = (group - segment.first_number) & (groups - 1)
    span = Span(
        count=cutlass.max(segment.num_pages - first + groups - 1, Int32(0)) // groups,
        first_number=segment.first_number + first,
        first_position=(segment.first_page + first) * PAGE_SIZE,
        slot=slot,
    )
    taker = Taker(c, segment.row, segment.length)
    score_span(c.inputs, scorer, weights, span, thread, take_score, taker, plan)


class Taker(NamedTuple):
    """Where the scores of a segment go."""

    writer: Writer
    row: Int32
    length: Int32


@cute.jit
def take_score(
    taker: Taker, score: Float32, position: Int32, valid: cutlass.Boolean, present: cutlass.Boolean
) -> None:
    """Into its slot; -inf where the page id is outside the cache."""
    if not valid:
        score = -Float32.inf
    if present and position < taker.length:
        store_score(taker.writer, taker.row, position, score)
