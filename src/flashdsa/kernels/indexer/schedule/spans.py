"""All rows as one stream of pages, cut into equal spans: each CTA gets one.

Whole rows that are little more than the CTAs, or that are long, leave some CTAs without work at the
end. Spans end together. One may begin and end inside rows; the CTAs whose spans have pages of a
row share it, each alone (see select/shared_pairs.py). Only the last row of a span goes on in the
next one, so a CTA is the first sharer of one row at most, and a later sharer of one row at most.

Four queries of a request are two pairs. Then CTAs with even numbers cut the stream of first pairs,
the others that of second pairs: two CTAs read the same pages at about the same time, and the second
one finds them in the second-level cache.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.warp import prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.schedule.deadlines import Tally, in_steps, least_time
from flashdsa.kernels.indexer.schedule.work_tile import (
    COORD_WORDS,
    Coord,
    Rows,
    Sharers,
    pages_to_score,
    row_length,
    sharing_word,
)
from flashdsa.kernels.indexer.sizes import MOST_WEIGHED, NUM_BINS, ORDERED_ROWS
from flashdsa.kernels.indexer.smem_views import Scratch, SelectBuffers, consumer_sync

CUT_MERGES = 2
"""Merges that cutting the stream costs each CTA: a part at either end of its span."""
ENDS = ORDERED_ROWS + MOST_WEIGHED
"""Words of the histogram before the ends of the stream's rows; keys and their order come first, and
where they were the cuts."""
assert ENDS + ORDERED_ROWS <= NUM_BINS


class Stream(NamedTuple):
    """The stream that the caller has a span of."""

    first: Int32  # row of the batch
    step: Int32  # rows of the batch from one row of the stream to the next
    rows: Int32  # once it is cut, only those with pages to score
    ctas: Int32  # that cut it
    cta: Int32  # the caller among them; one too many has no span

    @property
    def first_number(self) -> Int32:
        """Number of its first CTA among the sharers of all streams."""
        return self.first * self.ctas


class Span(NamedTuple):
    """A CTA's span, a word of `own_rows` each."""

    index: Int32  # of its first row in the stream
    rows: Int32
    first_page: Int32  # of the first row
    end_page: Int32  # of the last row, one past the span
    first_sharing: Int32  # see `sharing_word`; of the first row
    last_sharing: Int32  # of the last row, where it is another one


class Cut(NamedTuple):
    """A place in the stream, at the beginning of a page."""

    index: Int32  # of the row
    page: Int32


@cute.jit
def stream_of(rows: Rows, coord: Coord) -> Stream:
    """The caller's stream; `coord` has whole clusters."""
    step = Int32(1)
    if rows.requests * 2 == rows.count:
        step = Int32(2)
    cta = coord.group * coord.num_parts + coord.part
    ctas = coord.num_groups * coord.num_parts
    return Stream(cta % step, step, rows.count // step, ctas // step, cta // step)


@cute.jit
def time_of_spans(coord: Coord, tally: Tally, plan: cutlass.Constexpr) -> Float32:
    """Time at which all CTAs end, in pages."""
    return least_time(coord, tally, plan) + Float32(CUT_MERGES * plan.sharing.merge_pages)


@cute.jit
def spans_end_before(
    rows: Rows, coord: Coord, tally: Tally, last: Int32, plan: cutlass.Constexpr
) -> cutlass.Boolean:
    """Whether spans end before `last`, in TIME_STEPS; the same in all CTAs."""
    stream = stream_of(rows, coord)
    fits = stream.rows <= ORDERED_ROWS and stream.ctas > 0
    return fits and in_steps(time_of_spans(coord, tally, plan)) < last


@cute.jit
def cut_spans(
    select: SelectBuffers, rows: Rows, coord: Coord, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """Consumers: write the caller's span to own_rows, its coordinates to scratch, and the stream's
    rows, instead of all rows' lengths. Starts synced."""
    stream = stream_of(rows, coord)
    lane, warp = thread % WARP_SIZE, cute.arch.make_warp_uniform(thread // WARP_SIZE)
    row, pages = stream.first + thread * stream.step, Int32(0)
    if thread < stream.rows:
        pages = pages_to_score(row_length(rows, row), plan)
    # Rows without pages are left out: a load warp would look at each.
    scored = cute.arch.vote_ballot_sync(pages > 0)
    index = Int32(cute.arch.popc(scored & cute.arch.lanemask_lt()))
    end = prefix_sum(pages + plan.sharing.select_pages if pages > 0 else pages, lane)
    # All consumers: the deadlines' results, which lie there, have been read.
    consumer_sync(plan)
    if lane == WARP_SIZE - 1:
        select.scratch[Scratch.WARP_SUMS + warp] = end
        select.scratch[Scratch.WARP_ROWS + warp] = Int32(cute.arch.popc(scored))
    # All consumers: every warp's sums are in scratch.
    consumer_sync(plan)
    ends, counts = Int32(0), Int32(0)
    if lane < plan.consumer_warps:
        ends = select.scratch[Scratch.WARP_SUMS + lane]
        counts = select.scratch[Scratch.WARP_ROWS + lane]
    total = cute.arch.warp_redux_sync(ends, "add")
    stream = stream._replace(rows=cute.arch.warp_redux_sync(counts, "add"))
    end += cute.arch.warp_redux_sync(ends if lane < warp else Int32(0), "add")
    index += cute.arch.warp_redux_sync(counts if lane < warp else Int32(0), "add")
    if pages > 0:
        select.histogram[ENDS + index] = end
        select.lengths[index] = row
    if thread >= stream.rows:
        select.histogram[ENDS + thread] = total
    # All consumers: rows and ends are written.
    consumer_sync(plan)
    if thread <= stream.ctas:
        cut = cut_before(select, stream, thread, plan)
        for i in cutlass.range_constexpr(len(Cut._fields)):
            select.histogram[len(Cut._fields) * thread + i] = cut[i]
    # All consumers: every cut is written.
    consumer_sync(plan)
    if warp == 0:
        write_span(select, coord, stream, lane, plan)


@cute.jit
def cut_before(select: SelectBuffers, stream: Stream, cta: Int32, plan: cutlass.Constexpr) -> Cut:
    """The place where a CTA's span begins: a later one for each later CTA, or the same one. A cut
    close to a row's beginning or end is moved there."""
    total = select.histogram[ENDS + ORDERED_ROWS - 1]
    share = total // stream.ctas
    place = cta * share + cutlass.min(cta, total - share * stream.ctas)
    index, page = stream.rows, Int32(0)
    if cta < stream.ctas and place < total:  # of few pages, later CTAs have none
        index = Int32(0)  # rows that end at the place or before
        for bit in cutlass.range_constexpr(ORDERED_ROWS.bit_length() - 2, -1, -1):
            other = index + (1 << bit)
            if select.histogram[ENDS + other - 1] <= place:
                index = other
        page = place - beginning(select, index)
        if page < plan.sharing.select_pages:
            page = Int32(0)
        elif page > pages_in(select, index, plan) - plan.sharing.select_pages:
            index, page = index + 1, Int32(0)
    return Cut(index, page)


def cut_at(select: SelectBuffers, cta: Int32) -> Cut:
    """`cut_before` of a CTA, once it is written."""
    return Cut(*(select.histogram[len(Cut._fields) * cta + i] for i in range(len(Cut._fields))))


@cute.jit
def beginning(select: SelectBuffers, index: Int32) -> Int32:
    """The place at which a row of the stream begins, in pages."""
    place = Int32(0)
    if index > 0:
        place = select.histogram[ENDS + index - 1]
    return place


@cute.jit
def pages_in(select: SelectBuffers, index: Int32, plan: cutlass.Constexpr) -> Int32:
    """Pages of a row of the stream: selecting in it takes the time of some more."""
    taken = select.histogram[ENDS + index] - beginning(select, index)
    return taken - plan.sharing.select_pages


@cute.jit
def write_span(
    select: SelectBuffers, coord: Coord, stream: Stream, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """One warp: see `cut_spans`."""
    own_cta = cutlass.min(stream.cta, stream.ctas)  # one too many begins at the end
    begin = cut_at(select, own_cta)
    end = cut_at(select, cutlass.min(own_cta + 1, stream.ctas))
    last, end_page = end.index, end.page
    if end_page == 0:
        last = end.index - 1
        if last >= 0:
            end_page = pages_in(select, last, plan)
    # CTAs that begin up to the beginning of the first row, before its end, before the last's end.
    at_first, in_first, in_last = Int32(0), Int32(0), Int32(0)
    for block in cutlass.range(0, stream.ctas, WARP_SIZE, unroll=1):
        cut = cut_at(select, cutlass.min(block + lane, stream.ctas))
        earlier = cut.index < begin.index or (cut.index == begin.index and cut.page == 0)
        is_cta = block + lane < stream.ctas
        at_first += votes(is_cta and earlier)
        in_first += votes(is_cta and cut.index <= begin.index)
        in_last += votes(is_cta and cut.index <= last)
    own = Int32(0)
    if begin.page > 0:
        own = stream.cta - (at_first - 1)
    first = stream.first_number + stream.cta
    first_sharers = Sharers(first - own, in_first - stream.cta + own, own)
    last_sharers = Sharers(first, in_last - stream.cta, Int32(0))
    turns = cutlass.max(last - begin.index + 1, Int32(0))
    span = Span(
        begin.index,
        turns,
        begin.page,
        end_page,
        sharing_word(first_sharers),
        sharing_word(last_sharers),
    )
    # A group of its own, with the cluster's rank; 0 splits: it has a span.
    zero, one = Int32(0), Int32(1)
    coord = coord._replace(first_rank=coord.part, part=zero, num_parts=one, num_splits=zero)
    coord = coord._replace(turns=turns, depth=Int32(plan.full_depth))
    if lane == 0:
        for i in cutlass.range_constexpr(len(Span._fields)):
            select.own_rows[i] = span[i]
        for i in cutlass.range_constexpr(COORD_WORDS):
            select.scratch[Scratch.COORD + i] = coord[i]


def votes(condition: cutlass.Boolean) -> Int32:
    """Lanes of the warp for which it holds."""
    return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(condition)))


class SpanPart(NamedTuple):
    """Part of a row that a span has."""

    first: Int32  # page
    end: Int32
    sharing: Int32  # see `sharing_word`


def row_in_span(select: SelectBuffers, turn: Int32) -> Int32:
    """The span's row of that turn."""
    return select.lengths[span_of(select).index + turn]


@cute.jit
def part_in_span(select: SelectBuffers, turn: Int32, pages: Int32) -> SpanPart:
    """The part of a row of so many pages that the span has."""
    span = span_of(select)
    first, end, sharing = Int32(0), pages, Int32(1)
    if turn == span.rows - 1:
        end, sharing = span.end_page, span.last_sharing
    if turn == 0:
        first, sharing = span.first_page, span.first_sharing
    return SpanPart(first, end, sharing)


def span_of(select: SelectBuffers) -> Span:
    """Read the caller's span."""
    return Span(*(select.own_rows[i] for i in range(len(Span._fields))))
