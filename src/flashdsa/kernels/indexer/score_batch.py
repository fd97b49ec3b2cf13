"""Pages of a tile scored into the lists: the fused kernel's way to fill them, of one row or of two.

Rows in pairs: each half of the consumers, a *team*, selects in a row of its own. All consumers
score pages together; select/by_pairs.py is what a team does.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.static import Static
from flashdsa.dsl.warp import kept
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.plan import TeamPlan
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile, pages_between, row_length, word_in
from flashdsa.kernels.indexer.select.by_pairs import select_by_team
from flashdsa.kernels.indexer.select.keys import LOWEST_KEY, NO_POSITION, bin_of, sortable
from flashdsa.kernels.indexer.select.lists import (
    Listed,
    ListSink,
    PageRange,
    count_in_bin,
    first_room,
    list_score,
    put_key,
)
from flashdsa.kernels.indexer.select.published import Published
from flashdsa.kernels.indexer.select.tiles import select_tiles
from flashdsa.kernels.indexer.sizes import ROW_COUNTERS
from flashdsa.kernels.indexer.smem_views import (
    ClusterBuffers,
    IndexerMemory,
    InputBuffers,
    Scratch,
    SelectBuffers,
    Selecting,
    cluster_buffers_in,
    consumer_sync,
    select_buffers_in,
)
from flashdsa.problem import PAGE_SIZE


class PageScoring(NamedTuple):
    """An architecture's scoring of pages: two functions that all consumers call.

    prepare: (x, tile stage) is called before pages of a tile; returns what `score_pages` takes as
        the prepared. `x` is a `Scoring`.
    score_pages: (x, prepared, PageRange, store, sink) scores the calling warpgroup's share of the
        pages. It calls store(sink, score, position, valid, present) with all lanes: the score of
        the token at that position of the row, whether its page id is in the cache, and whether the
        lane has a token. Rows in pairs: see sm90/score_pairs.py.
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
    s: Selecting, source: PageSource, tile: WorkTile, stage: Int32, listed: Listed
) -> Listed:
    """Score as many of the tile's pages as the list has room for. Ends synced."""
    scoring, plan = source.scoring, s.plan
    entries, floor = listed.entries, listed.floor
    x = Scoring(s.inputs, source.scorer, s.thread, s.static)
    prepared = scoring.prepare(x, stage)
    in_order = floor == 0
    room = (plan.lists.capacity - entries) // PAGE_SIZE
    room = first_room(room, in_order, tile, s.coord, plan)
    room = room // plan.pages_per_stage * plan.pages_per_stage
    # Opaque, so that one register holds it through the loops, and not a second one the sum.
    stop = opaque(cutlass.min(tile.num_pages, listed.pages + room))
    first_number = word_in(s.inputs.tiles, stage, "first_number")
    pages = PageRange(stage, tile.first_page, tile.num_pages, first_number, listed.pages, stop)
    turn = s.thread // WARPGROUP_SIZE - first_number  # one of the warpgroup's turns, modulo 2
    first_page = tile.first_page + pages_between(turn, stop, tile.num_pages, plan)
    sink = ListSink(s.select, first_page * PAGE_SIZE, tile.length, floor, in_order)
    scoring.score_pages(x, prepared, pages, list_score, sink)
    # Orders the reads of the tile's weights before the copy that may overwrite them later.
    cute.arch.fence_proxy("async.shared", space="cta")
    # All consumers: the list is complete up to `stop`, and nobody reads the tile's stage any more.
    consumer_sync(plan)
    if in_order:
        entries = stop * PAGE_SIZE
    else:
        entries = s.select.scratch[Scratch.COUNT]
        consumer_sync(plan)  # everyone has read the count, so that it may be written again
    return Listed(entries, stop, floor)


def doubled_relu(value: Float32) -> Float32:
    """2 max(value, 0), NaN stays NaN."""
    magnitude = cute.arch.inline_ptx(
        "abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )
    return value + magnitude


SECOND_ROW = 2
"""Bit of a lane's number that names the row of its scores."""
FIRST_ROWS_LANES = 0x33333333
"""Bits of the lanes whose SECOND_ROW bit is 0."""
ROW_LANES = WARP_SIZE // 2
"""Lanes of a warp that have scores of the same row."""
WARP_TOKENS = ROW_LANES
"""Tokens of a page that a warp has: one for each of those lanes."""


class TogetherSource(NamedTuple):
    """Source of the scores in `score_together`."""

    pages: PageSource
    memory: IndexerMemory  # of the CTA
    thread: Int32  # of the CTA
    static: Static  # the plan of the CTA

    @property
    def scoring(self) -> PageScoring:
        return self.pages.scoring


def memory_of(memory: IndexerMemory, team: Int32) -> IndexerMemory:
    """The memory in which a team's regions have the addresses of the first team's in `memory`."""
    smem = memory.plan.smem
    apart = smem.offset("other_team") - smem.offset("keys")
    return memory._replace(base=(memory.base + team * apart).align(64))


def row_of_lane(lane: Int32) -> Int32:
    """Row, of the two, that a lane's scores belong to."""
    return lane // SECOND_ROW % 2


def lane_of_row(lane: Int32) -> Int32:
    """The lane's number among those that have scores of the same row."""
    return lane // 4 * 2 + lane % 2


def select_buffers_of(memory: IndexerMemory, team: Int32, plan: Any) -> SelectBuffers:
    """Return the buffers that a team selects in; the schedule's buffers are no team's."""
    select = select_buffers_in(memory_of(memory, team), plan)
    return select._replace(own_rows=None, lengths=None)


class PairSink(NamedTuple):
    """Destination of a lane's scores: as `ListSink`, but each warp has its own segment of a list
    that is not in order (see select/by_pairs.py), so that nobody waits for a counter."""

    select: SelectBuffers  # of the lane's row
    first_position: Int32  # of the part
    length: Int32  # tokens of the row
    floor: Uint32  # keys below it cannot win any more
    ordered: cutlass.Boolean  # an entry's index is that of its position in the part
    slot: Int32  # the first free index of the warp's segment
    row_lanes: Int32  # bits of the warp's lanes whose scores are of the same row
    lanes_before: Int32  # those of them before the caller


@cute.jit
def score_together(
    s: Selecting, source: TogetherSource, tile: WorkTile, stage: Int32, listed: Listed
) -> Listed:
    """Same as `score_batch`, for both teams, whose rows' pages are the same. It goes on after the
    first compaction until a segment of either list is full. The fullest segment gives the number of
    pages that are scored in between, as if all their tokens would win."""
    scoring, whole, floor = source.scoring, source.static.value, listed.floor
    thread, plan = s.thread, s.plan
    mine, lane = s.select.scratch, source.thread % WARP_SIZE
    # Those of the lane's row of scores; kept, as every iteration of the loop needs them.
    lists = select_buffers_of(source.memory, kept(row_of_lane(lane), lane), whole)
    row_lanes = kept(Int32(FIRST_ROWS_LANES) << (lane & SECOND_ROW), lane)
    lanes_before = kept(row_lanes & Int32(cute.arch.lanemask_lt()), lane)
    if thread == 0:
        mine[Scratch.LIST_FLOOR] = Int32(floor)
    # All consumers of the CTA: both lists may be added to, and both floors are written.
    consumer_sync(whole)
    # A row without room in the list is listed by segments from the start.
    ordered = floor == 0 and tile.num_pages <= plan.ordered_entries // PAGE_SIZE
    lane_floor = cutlass.max(Uint32(lists.scratch[Scratch.LIST_FLOOR]), Uint32(LOWEST_KEY))
    slot, free = own_segment(lists, listed.pages > 0, source.thread, whole)
    # It syncs all consumers of the CTA: everyone has read all of both lists.
    x = Scoring(s.inputs, source.pages.scorer, source.thread, source.static)
    prepared = scoring.prepare(x, stage)
    room = free // WARP_TOKENS * whole.consumer_warpgroups
    if ordered:
        room = Int32(plan.ordered_entries // PAGE_SIZE)
    elif floor == 0:
        room = cutlass.min(room, first_room(room, cutlass.Boolean(True), tile, s.coord, plan))
    first_number = word_in(s.inputs.tiles, stage, "first_number")
    length = row_length(s.output.rows, (tile.row & -2) + row_of_lane(lane))
    first_position = tile.first_page * PAGE_SIZE
    stop, more, score_pages = listed.pages, cutlass.Boolean(True), scoring.score_pages
    while more:
        begin = stop
        stop = opaque(cutlass.min(tile.num_pages, begin + room))
        pages = PageRange(stage, tile.first_page, tile.num_pages, first_number, begin, stop)
        sink = PairSink(
            lists, first_position, length, lane_floor, ordered, slot, row_lanes, lanes_before
        )
        slot = score_pages(x, prepared, pages, list_pair, sink)
        if not ordered and (lane == 0 or lane == SECOND_ROW):
            warp = source.thread // WARP_SIZE
            lists.scratch[Scratch.SEGMENTS + warp] = slot - warp * whole.segment_entries
        more = floor != 0 and stop < tile.num_pages
        if more:
            # All consumers of the CTA: each segment's number of entries is written.
            consumer_sync(whole)
            _, free = own_segment(lists, cutlass.Boolean(True), source.thread, whole)
            room = free // WARP_TOKENS * whole.consumer_warpgroups
            more = free * whole.consumer_warps >= plan.refill_entries
            # All consumers of the CTA: everyone has read it, so that it may be written again.
            consumer_sync(whole)
    # Orders the reads of the tile's weights before the copy that may overwrite them later.
    cute.arch.fence_proxy("async.shared", space="cta")
    # All consumers of the CTA: both lists are complete up to `stop`, and nobody reads the tile's
    # stage any more.
    consumer_sync(whole)
    entries = fullest = stop * PAGE_SIZE
    if not ordered:
        _, free = own_segment(lists, cutlass.Boolean(True), source.thread, whole)
        entries = Int32(plan.lists.capacity)
        fullest = plan.lists.capacity - free * whole.consumer_warps
        is_full = plan.lists.capacity - fullest < plan.refill_entries
        if stop == tile.num_pages or is_full or floor == 0:
            clear_rest(lists, slot, source.thread, whole)
    if thread == 0:
        mine[Scratch.FULLEST] = fullest
    # All consumers of the CTA: both lists may be read, and the words with their lengths are
    # written.
    consumer_sync(whole)
    return Listed(entries, stop, floor)


@cute.jit
def own_segment(
    lists: SelectBuffers, used: cutlass.Boolean, thread: Int32, plan: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """(the first free index of the calling warp's segment, room in the fullest segment of both
    lists). Not `used`: all segments are empty. All lanes call, which see both lists."""
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    slot, free = warp * plan.segment_entries, Int32(plan.segment_entries)
    if used:
        slot += lists.scratch[Scratch.SEGMENTS + warp]
        free -= lists.scratch[Scratch.SEGMENTS + lane_of_row(lane)]
    return slot, cute.arch.warp_redux_sync(free, "min")


@cute.jit
def clear_rest(lists: SelectBuffers, slot: Int32, thread: Int32, plan: cutlass.Constexpr) -> None:
    """Fill the free entries of the calling warp's segments with entries that never win."""
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    end = (warp + 1) * plan.segment_entries
    for i in cutlass.range(slot + lane_of_row(lane), end, ROW_LANES, unroll=1):
        lists.keys[i] = Int32(0)
        lists.positions[i] = Int32(NO_POSITION)


@cute.jit
def list_pair(
    sink: PairSink, slot: Int32, score: cutlass.Float32, position: Int32, valid: cutlass.Boolean
) -> Int32:
    """List two rows' scores as `list_score` does, each into its own row's list; return the first
    free index after them."""
    key = sortable(score)
    valid = valid and position < sink.length
    if sink.ordered:
        put_key(sink.select, position - sink.first_position, key, valid)
    else:
        wanted = valid and key >= sink.floor
        mask = Int32(cute.arch.vote_ballot_sync(wanted))
        index = slot + Int32(cute.arch.popc(mask & sink.lanes_before))
        slot += Int32(cute.arch.popc(mask & sink.row_lanes))
        if wanted:
            sink.select.keys[index] = Int32(key)
            sink.select.positions[index] = position
            count_in_bin(sink.select, bin_of(key))
    return slot


@cute.jit
def select_in_teams(
    s: Selecting, memory: IndexerMemory, pages: PageSource, num_ctas: Int32
) -> None:
    """Role select for rows in pairs: select in each team's, in its own memory. s: of the whole
    CTA."""
    thread, plan = s.thread, s.plan
    one = TeamPlan(plan)
    team = cute.arch.make_warp_uniform(thread // one.consumer_threads)
    mine = thread % one.consumer_threads
    source = TogetherSource(pages, memory, thread, Static(plan))
    team_s = s._replace(
        select=select_buffers_of(memory, team, plan),
        cluster=cluster_buffers_of(memory, team, plan),
        published=published_of(s.published, team, num_ctas, plan),
        thread=mine,
        static=Static(one),
        team=team,
    )
    select_tiles(team_s, source, score_together, select_by_team)


def published_of(published: Published, team: Int32, num_ctas: Int32, plan: Any) -> Published:
    """Device memory of a team's rows: counters and slots of the first team come first."""
    arrivals = published.arrivals.iterator + team * num_ctas * ROW_COUNTERS
    slots = [
        cute.make_tensor(words.iterator + Int64(2 * team * num_ctas) * words.shape[1], words.layout)
        for words in published[1:]
    ]
    return Published(cute.make_tensor(arrivals, published.arrivals.layout), *slots)


def cluster_buffers_of(memory: IndexerMemory, team: Int32, plan: Any) -> ClusterBuffers:
    """Return the buffers to which the same teams of other CTAs write."""
    return cluster_buffers_in(memory_of(memory, team), plan)._replace(
        coarse_full=memory.coarse_full.behind(team),
        fine_full=memory.fine_full.behind(team),
        received_full=memory.received_full.behind(team),
    )


LANES_APART = (4, 8, 16)
"""Distances of the lanes that have tokens of the same block."""


def best_of_block(score: Float32) -> Float32:
    """The best number among the scores of the caller's block; NaN if there is none."""
    for apart in LANES_APART:
        score = cute.arch.fmax(score, cute.arch.shuffle_sync_bfly(score, apart))
    return score
