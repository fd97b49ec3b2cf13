"""Two rows of a request, scored together: each half of the consumers, a *team*, ranks one of them.

All consumers score pages, and put each score into the list of its row. Between two batches of pages
a team is alone with its row: its list, histogram and candidates, and a named barrier. Lists are
compacted at the same time in both teams, whichever is full, so that both list the same pages.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from flashdsa.dsl.arena import Arena
from flashdsa.dsl.static import Static
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import consumer_sync
from flashdsa.kernels.indexer.schedule.coord import COORD_WORDS
from flashdsa.kernels.indexer.schedule.work_tile import row_length, word_in
from flashdsa.kernels.indexer.score_batch import PageScoring, PageSource
from flashdsa.kernels.indexer.select.bins import bin_of, sortable
from flashdsa.kernels.indexer.select.candidate_list import count_in_bin, put
from flashdsa.kernels.indexer.select.list_scores import Batch, ListSink, PageRange, first_fill
from flashdsa.kernels.indexer.select.row_splits import Published
from flashdsa.kernels.indexer.select.select_rows import SelectContext, select_rows
from flashdsa.kernels.indexer.sizes import ROW_COUNTERS
from flashdsa.kernels.indexer.smem_views import (
    SCRATCH_COORD,
    SCRATCH_COUNT,
    SCRATCH_FULLEST,
    SCRATCH_LIST_FLOOR,
    ClusterBuffers,
    SelectBuffers,
    cluster_buffers_in,
    select_buffers_in,
)
from flashdsa.problem import PAGE_SIZE

SECOND_ROW = 2
"""Of a lane's number, the bit that names the row of its scores."""
FIRST_ROWS_LANES, SECOND_ROWS_LANES = 0x33333333, 0xCCCCCCCC - (1 << 32)


class TogetherSource(NamedTuple):
    """What `score_together` scores with."""

    pages: PageSource
    of_lane: SelectBuffers  # those of the row that the calling lane has scores of
    thread: Int32  # of the CTA
    static: Static  # the plan of the CTA

    @property
    def scoring(self) -> PageScoring:
        """The architecture's functions."""
        return self.pages.scoring


def arena_of(arena: Arena, team: Int32) -> Arena:
    """The arena in which a team's regions lie where the first one's are in `arena`."""
    smem = arena.plan.smem
    apart = smem.offset("other_team") - smem.offset("keys")
    return Arena((arena.base + team * apart).align(64), arena.static)


def row_of_lane(lane: Int32) -> Int32:
    """Which of the two rows a lane's scores are of."""
    return lane // SECOND_ROW % 2


def select_buffers_of(arena: Arena, team: Int32, plan: Any) -> SelectBuffers:
    """What a team selects in; the schedule's buffers are no team's."""
    select = select_buffers_in(arena_of(arena, team), plan)
    return select._replace(own_rows=None, lengths=None)


def cluster_buffers_of(arena: Arena, team: Int32, plan: Any) -> ClusterBuffers:
    """What the same teams of other CTAs write to."""
    events = ("coarse_full", "fine_full", "received_full")
    return cluster_buffers_in(arena_of(arena, team), plan)._replace(
        **{event: arena.barriers(event).behind(team) for event in events}
    )


def published_of(published: Published, team: Int32, num_ctas: Int32, plan: Any) -> Published:
    """Device memory of a team's rows: counters and slots of the first team come first."""
    arrivals = published.arrivals.iterator + team * num_ctas * ROW_COUNTERS
    slots = published.slots.iterator + Int64(team * num_ctas) * plan.slot_words
    return Published(
        cute.make_tensor(arrivals, published.arrivals.layout),
        cute.make_tensor(slots, published.slots.layout),
    )


@cute.jit
def share_schedule(
    arena: Arena,
    team: Int32,
    thread: Int32,
    given_out: cutlass.Boolean,
    plan: cutlass.Constexpr,
) -> None:
    """The second team's copy of what the schedule gave the CTA, if it gave anything out; the team
    syncs before it looks."""
    given = select_buffers_in(arena, plan).scratch
    mine = select_buffers_of(arena, team, plan).scratch
    if given_out and team == 1 and thread < COORD_WORDS:
        mine[SCRATCH_COORD + thread] = given[SCRATCH_COORD + thread]


@cute.jit
def select_in_teams(
    ctx: SelectContext,
    arena: Arena,
    pages: PageSource,
    thread: Int32,
    num_ctas: Int32,
    given_out: cutlass.Boolean,
    plan: cutlass.Constexpr,
) -> None:
    """Role select of rows in pairs: `select_rows` of each team, in its own memory.

    Args:
        ctx: of the whole CTA. thread: of it. given_out: rows, by their lengths.
    """
    one = plan.of_team
    team = cute.arch.make_warp_uniform(thread // one.consumer_threads)
    mine = thread % one.consumer_threads
    share_schedule(arena, team, mine, given_out, plan)
    of_lane = select_buffers_of(arena, row_of_lane(thread % WARP_SIZE), plan)
    source = TogetherSource(pages, of_lane, thread, Static(plan))
    ctx = ctx._replace(
        select=select_buffers_of(arena, team, plan),
        cluster=cluster_buffers_of(arena, team, plan),
        published=published_of(ctx.published, team, num_ctas, plan),
        team=team,
    )
    select_rows(ctx, source, score_together, mine, one)


@cute.jit
def score_together(
    ctx: SelectContext,
    source: TogetherSource,
    batch: Batch,
    entries: Int32,
    floor: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """As `score_batch`, for both teams, whose rows' pages are the same."""
    tile, scoring, whole = batch.tile, source.scoring, source.static.value
    mine, lists = ctx.select.scratch, source.of_lane
    if thread == 0:
        mine[SCRATCH_LIST_FLOOR] = Int32(floor)
    # All consumers of the CTA: both lists may be added to, and both floors are there.
    consumer_sync(whole)
    lane_floor = Uint32(lists.scratch[SCRATCH_LIST_FLOOR])
    fullest = fullest_list(lists)
    # It syncs all consumers of the CTA: everyone has read both counts.
    prepared = scoring.prepare(ctx.inputs, source.pages.scorer, batch.stage, source.thread, whole)
    in_order = floor == 0
    room = (plan.list_capacity - fullest) // PAGE_SIZE
    if in_order and tile.num_pages > room and ctx.coord.num_parts == 1:
        room = first_fill(plan)
    stop = cutlass.min(tile.num_pages, batch.begin + room)
    first_number = word_in(ctx.inputs.tiles, batch.stage, "first_number")
    pages = PageRange(batch.stage, tile.first_page, first_number, batch.begin, stop)
    lane = source.thread % WARP_SIZE
    length = row_length(ctx.output.rows, (tile.row & -2) + row_of_lane(lane))
    sink = ListSink(lists, tile.first_page * PAGE_SIZE, length, lane_floor, in_order)
    scoring.score_pages(
        ctx.inputs, source.pages.scorer, prepared, pages, source.thread, list_pair, sink, whole
    )
    # Between the reads of the tile's weights and the copy that may overwrite them later.
    cute.arch.fence_proxy("async.shared", space="cta")
    # All consumers of the CTA: both lists are complete up to `stop`, and nobody reads the tile's
    # stage any more.
    consumer_sync(whole)
    entries = fullest = stop * PAGE_SIZE
    if not in_order:
        entries, fullest = mine[SCRATCH_COUNT], fullest_list(lists)
    if thread == 0:
        mine[SCRATCH_FULLEST] = fullest
    # All consumers of the CTA: everyone has read both counts, so that they may be written again.
    consumer_sync(whole)
    return entries, stop


@cute.jit
def fullest_list(lists: SelectBuffers) -> Int32:
    """Entries of the fullest list; all lanes call, which see all of them."""
    return cute.arch.warp_redux_sync(lists.scratch[SCRATCH_COUNT], "max")


@cute.jit
def list_pair(
    sink: ListSink,
    score: cutlass.Float32,
    position: Int32,
    valid: cutlass.Boolean,
    present: cutlass.Boolean,
) -> None:
    """As `list_score`, where lanes have scores of two rows, each a sink of its own list."""
    key = sortable(score)
    valid = valid and position < sink.length
    if sink.in_order:
        put(sink.select, position - sink.first_position, key, position, valid)
    else:
        wanted = valid and key >= sink.floor
        mask = Int32(cute.arch.vote_ballot_sync(wanted))
        if mask != 0:
            lane = cute.arch.lane_idx()
            second = row_of_lane(lane) == 1
            mask = mask & (Int32(SECOND_ROWS_LANES) if second else Int32(FIRST_ROWS_LANES))
            index = Int32(0)
            if lane == 0 or lane == SECOND_ROW:
                index = cute.arch.atomic_add(
                    sink.select.scratch.iterator + SCRATCH_COUNT,
                    Int32(cute.arch.popc(mask)),
                    sem="relaxed",
                    scope="cta",
                )
            index = cute.arch.shuffle_sync(index, lane & SECOND_ROW)
            index += Int32(cute.arch.popc(mask & Int32(cute.arch.lanemask_lt())))
            if wanted:
                sink.select.keys[index] = Int32(key)
                sink.select.positions[index] = position
                count_in_bin(sink.select, bin_of(key))
