"""Pages of a tile scored into the list: the fused kernel's way to fill it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.static import Static
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile, pages_between, word_in
from flashdsa.kernels.indexer.select import lists
from flashdsa.kernels.indexer.smem_views import InputBuffers, Scratch, Selecting, consumer_sync
from flashdsa.problem import PAGE_SIZE


class PageScoring(NamedTuple):
    """An architecture's scoring of pages: two functions that all consumers call.

    prepare: (x, tile stage) is called before pages of a tile; returns what `score_pages` takes as
        the prepared. `x` is a `Scoring`.
    score_pages: (x, prepared, PageRange, store, sink) scores the calling warpgroup's share of the
        pages. It calls store(sink, score, position, valid, present) with all lanes: the score of
        the token at that position of the row, whether its page id is in the cache, and whether the
        lane has a token. Rows in pairs: of the row of `row_of_lane`.
    """

    prepare: Callable[..., Any]
    score_pages: Callable[..., Any]


class Scoring(NamedTuple):
    """A consumer thread that scores pages. Who calls methods of a field in a loop takes the field
    out first, as for `Selecting`."""

    inputs: InputBuffers  # the consumer's end
    scorer: Any  # the architecture's
    thread: Int32  # of the CTA
    static: Static  # the plan

    @property
    def plan(self) -> Any:
        return self.static.value


class PageSource(NamedTuple):
    """Scores of pages: what to score with, and how."""

    scorer: Any
    static: Static  # PageScoring

    @property
    def scoring(self) -> PageScoring:
        return self.static.value


@cute.jit
def score_batch(
    s: Selecting, source: PageSource, tile: WorkTile, stage: Int32, listed: lists.Listed
) -> lists.Listed:
    """Score as many of the tile's pages as the list has room for. Ends synced."""
    scoring, plan = source.scoring, s.plan
    entries, floor = listed.entries, listed.floor
    x = Scoring(s.inputs, source.scorer, s.thread, s.static)
    prepared = scoring.prepare(x, stage)
    in_order = floor == 0
    room = (plan.lists.capacity - entries) // PAGE_SIZE
    room = lists.first_room(room, in_order, tile, s.coord, plan)
    room = room // plan.pages_per_stage * plan.pages_per_stage
    # Opaque, so that one register holds it through the loops, and not a second one the sum.
    stop = opaque(cutlass.min(tile.num_pages, listed.pages + room))
    first_number = word_in(s.inputs.tiles, stage, "first_number")
    pages = lists.PageRange(
        stage, tile.first_page, tile.num_pages, first_number, listed.pages, stop
    )
    turn = s.thread // WARPGROUP_SIZE - first_number  # one of the warpgroup's turns, modulo 2
    first_page = tile.first_page + pages_between(turn, stop, tile.num_pages, plan)
    sink = lists.ListSink(s.select, first_page * PAGE_SIZE, tile.length, floor, in_order)
    scoring.score_pages(x, prepared, pages, lists.list_score, sink)
    # Orders the reads of the tile's weights before the copy that may overwrite them later.
    cute.arch.fence_proxy("async.shared", space="cta")
    # All consumers: the list is complete up to `stop`, and nobody reads the tile's stage any more.
    consumer_sync(plan)
    if in_order:
        entries = stop * PAGE_SIZE
    else:
        entries = s.select.scratch[Scratch.COUNT]
        consumer_sync(plan)  # everyone has read the count, so that it may be written again
    return lists.Listed(entries, stop, floor)


def doubled_relu(value: Float32) -> Float32:
    """2 max(value, 0), NaN stays NaN."""
    magnitude = cute.arch.inline_ptx(
        "abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )
    return value + magnitude


SECOND_ROW = 2
"""Bit of a lane's number that names the row of its scores, if two are scored together."""


def row_of_lane(lane: Int32) -> Int32:
    """Row, of the two, that a lane's scores belong to."""
    return lane // SECOND_ROW % 2


LANES_APART = (4, 8, 16)
"""Distances of the lanes that have tokens of the same block."""


def best_of_block(score: Float32) -> Float32:
    """The best number among the scores of the caller's block; NaN if there is none."""
    for apart in LANES_APART:
        score = cute.arch.fmax(score, cute.arch.shuffle_sync_bfly(score, apart))
    return score
