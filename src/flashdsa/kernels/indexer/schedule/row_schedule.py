"""Assignment of rows to groups of CTAs, and of CTAs to a row: by the lengths, on the device.

Every CTA weighs the lengths of all rows, and all come to the same results. One row per cluster is
kept if the lengths are even enough. Otherwise the rows are put in order, the longest first, and
given out so that the last CTA ends early: see deadlines.py. Pairs of rows may be cut into spans
instead: see spans.py.

A thread weighs one row, so there may be ORDERED_ROWS of them. Of more rows each request's are
weighed together, as if all were as long as the longest of them.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from flashdsa.dsl.smem import VECTOR, load4
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import consumer_sync
from flashdsa.kernels.indexer.schedule.coord import (
    COORD_WORDS,
    Coord,
    index_of_turn,
    most_halvings,
    split,
)
from flashdsa.kernels.indexer.schedule.deadlines import (
    ORDER_BITS,
    WARP_BITS,
    Tally,
    best_division,
    give_out,
    key_of,
    least_time,
    of_group,
)
from flashdsa.kernels.indexer.schedule.spans import (
    cut_spans,
    spans_end_before,
    time_of_spans,
)
from flashdsa.kernels.indexer.schedule.work_tile import (
    Rows,
    clamped,
    pages_to_score,
    raw_length,
    row_length,
)
from flashdsa.kernels.indexer.sizes import (
    DEPTH_STEPS,
    MAX_HALVINGS,
    MOST_WEIGHED,
    NUM_BINS,
    ORDERED_ROWS,
)
from flashdsa.kernels.indexer.smem_views import SCRATCH_COORD, SCRATCH_TALLY, SelectBuffers

MOST_ORDERED_PAGES = (1 << 31 - ORDER_BITS) - 1
"""Rows with more pages than this count as equally long."""
MAX_SHARING = 2
"""Halvings of the comparisons of a row, at most."""
EVEN = 1.25
"""Rows with a cluster each are even if the longest takes at most this factor of the least time of
all, plus the cost of splitting."""
EQUAL = 1.03
"""Rows are equal if the longest has at most this factor of their average."""


@cute.jit
def first_lengths(
    select: SelectBuffers,
    rows: Rows,
    coord: Coord,
    thread: Int32,
    consumes: cutlass.Boolean,
    plan: cutlass.Constexpr,
) -> Int32:
    """The length, as it is in memory, that the thread needs first; the caller syncs.

    Lane 0 of a load warp gets the length of the row with the cluster's number. Its other lanes ask
    for the next rows: if all lanes shared a number, ptxas would wait for it here, to keep it only
    once. A consumer, if rows are weighed, gets the length of the first row that it weighs. A lane
    gets that of the row with its number if clusters are dealt to rows.
    """
    row = thread % WARP_SIZE
    if const_expr(not plan.dealt):
        row += coord.group
    if const_expr(plan.scheduled):
        if consumes:
            row = thread * coord.together
        if thread < len(Tally._fields):
            select.scratch[SCRATCH_TALLY + thread] = Int32(0)
    return raw_length(rows, row)


@cute.jit
def schedule_rows(
    select: SelectBuffers,
    rows: Rows,
    coord: Coord,
    first_lengths: Int32,
    thread: Int32,
    consumes: cutlass.Boolean,
    plan: cutlass.Constexpr,
) -> Coord:
    """All threads of a CTA: return its coordinates as the rows' lengths decide. The rows of its
    group are in own_rows if they are given out by lengths.

    Groups are as small as they can be if the rows are too many to be weighed.
    """
    if const_expr(plan.scheduled):
        if coord.together > 0:
            if consumes:
                length = clamped(rows, first_lengths)
                weigh_rows(select, rows, coord.together, length, thread, plan)
            # All threads of the CTA: the tally is in scratch, and all lengths.
            cute.arch.sync_threads()
            tally = Tally(*(select.scratch[SCRATCH_TALLY + i] for i in range(len(Tally._fields))))
            even = even_choice(rows, tally, coord, plan)
            if even.turns == 0:
                if consumes:
                    put_in_order(select, rows, coord.together, thread, plan)
                    consumer_sync(plan)
                    give_out_or_cut(select, rows, coord, tally, thread, plan)
                # All threads of the CTA: coordinates and own_rows are written.
                cute.arch.sync_threads()
                coord = read_coord(select, coord)
            else:
                coord = in_batch_order(rows, coord, even, plan)
        else:
            coord = split(coord, most_halvings(coord))
            turns = (rows.count + coord.num_groups - 1) // coord.num_groups
            coord = coord._replace(turns=turns)
    return coord


@cute.jit
def give_out_or_cut(
    select: SelectBuffers,
    rows: Rows,
    coord: Coord,
    tally: Tally,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Consumers: give the rows out so that the last CTA ends earliest."""
    lane, warp = thread % WARP_SIZE, cute.arch.make_warp_uniform(thread // WARP_SIZE)
    best, least = best_division(select, coord, tally, warp, lane, plan)
    cuts = cutlass.Boolean(False)
    if const_expr(plan.cuts_spans):
        cuts = spans_end_before(rows, coord, tally, least >> WARP_BITS, plan)
        if cuts:
            cut_spans(select, rows, coord, thread, plan)
    if best.last == least and not cuts:
        give_out(select, coord, tally, best, lane, plan)


def read_coord(select: SelectBuffers, coord: Coord) -> Coord:
    """Read the coordinates that were given to the caller's group."""
    words = [select.scratch[SCRATCH_COORD + i] for i in range(COORD_WORDS)]
    known = dict(zip(Coord._fields, words, strict=False))
    return coord._replace(ordered=cutlass.Boolean(True), **known)


@cute.jit
def weigh_rows(
    select: SelectBuffers,
    rows: Rows,
    together: Int32,
    length: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Consumers: write the length of the thread's first row, the key of its rows, and all rows'
    tally.

    The keys order the rows by pages, then by number, and overlay the histogram.
    """
    assert const_expr(plan.consumer_threads == ORDERED_ROWS)
    first = thread * together
    select.lengths[thread] = length
    for other in cutlass.range(first + 1, first + together, unroll=1):
        length = cutlass.max(length, row_length(rows, other))
    pages = cutlass.min(pages_to_score(length, plan), Int32(MOST_ORDERED_PAGES))
    select.histogram[thread] = key_of(pages, first) if first < rows.count else Int32(-1)
    lane = thread % WARP_SIZE
    if first - lane * together < rows.count:
        total = cute.arch.warp_redux_sync(pages * together, "add")
        longest = cute.arch.warp_redux_sync(pages, "max")
        scored = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(pages > 0)))
        if lane == 0:
            tally = select.scratch.iterator + SCRATCH_TALLY
            cute.arch.atomic_add(tally, total, sem="relaxed", scope="cta")
            cute.arch.atomic_max(tally + 1, longest, sem="relaxed", scope="cta")
            cute.arch.atomic_add(tally + 2, scored * together, sem="relaxed", scope="cta")


class Even(NamedTuple):
    """Distribution of rows that keep the batch's order."""

    halvings: Int32
    turns: Int32  # 0: they do not


@cute.jit
def even_choice(rows: Rows, tally: Tally, coord: Coord, plan: cutlass.Constexpr) -> Even:
    """Decide whether giving the rows out by lengths gains nothing, so that they keep the batch's
    order."""
    halvings, turns = Int32(0), Int32(0)
    if rows.count <= coord.num_groups:
        turns = Int32(1)
        if const_expr(plan.splits):
            least = Float32(EVEN) * least_time(coord, tally, plan)
            longest = Float32(tally.longest) * of_group(coord, Int32(0))
            if longest > least + Float32(plan.sharing.merge_pages - 2 * plan.sharing.select_pages):
                turns = Int32(0)
    elif tally.scored == rows.count and Float32(tally.longest) * Float32(tally.scored) <= Float32(
        EQUAL
    ) * Float32(tally.pages):
        least = Float32(0.0)
        for more in cutlass.range_constexpr(MAX_HALVINGS + 1):
            if more <= most_halvings(coord):
                # The value is never a whole number, so that it need not be exact.
                of_groups = cute.arch.rcp_approx(Float32(coord.num_groups << more))
                needed = Int32((Float32(rows.count) - Float32(0.5)) * of_groups) + 1
                pages = Float32(tally.longest) * of_group(coord, Int32(more))
                time = Float32(needed) * (pages + Float32(plan.sharing.select_pages))
                if more == 0 or time < least:
                    halvings, turns, least = Int32(more), needed, time
        if const_expr(plan.cuts_spans):
            if time_of_spans(coord, tally, plan) < least:
                turns = Int32(0)
    return Even(halvings, turns)


@cute.jit
def in_batch_order(rows: Rows, coord: Coord, even: Even, plan: cutlass.Constexpr) -> Coord:
    """The caller's coordinates if clusters are halved that often. A group with one row fewer than
    others keeps fewer pages in flight, as in deadlines.py."""
    coord = split(coord, even.halvings)
    depth = Int32(plan.full_depth)
    if even.turns > 1:
        last = index_of_turn(coord.group, coord.num_groups, even.turns - 1)
        if last >= rows.count:
            share = cute.arch.rcp_approx(Float32(even.turns))
            depth -= Int32(Float32(plan.full_depth) * share)
            depth = cutlass.max(depth, Int32(DEPTH_STEPS))
    return coord._replace(turns=even.turns, depth=depth)


@cute.jit
def put_in_order(
    select: SelectBuffers, rows: Rows, together: Int32, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """Consumers: put the rows' keys, the largest first, after the first ORDERED_ROWS words."""
    assert const_expr(ORDERED_ROWS + MOST_WEIGHED <= NUM_BINS)
    count = rows.count
    if const_expr(rows.requests is not None):
        if together > 1:
            count = rows.requests
    number, before = order_of_key(select.histogram, count, thread, plan)
    if number >= 0:
        key = select.histogram[number]
        for i in cutlass.range(together, unroll=1):
            select.histogram[ORDERED_ROWS + before * together + i] = key - i


@cute.jit
def order_of_key(
    keys: cute.Tensor, count: Int32, thread: Int32, plan: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """(number of a key, how many come before it in the order), in one thread for each of `count`
    keys; (-1, ...) in the others. Two or four neighbouring threads share the comparisons of a key
    where they are few."""
    sharing = Int32(0)
    for shift in cutlass.range_constexpr(1, MAX_SHARING + 1):
        if count <= plan.consumer_threads >> shift:
            sharing = Int32(shift)
    number = thread >> sharing
    first = thread - (number << sharing)
    key = keys[number]
    before = Int32(0)
    # Keys beyond the last one are -1: they come before none.
    vectors = (count + VECTOR - 1) // VECTOR
    for four in cutlass.range(first, vectors, 1 << sharing, unroll=2):
        others = load4(keys, four)
        for i in cutlass.range_constexpr(VECTOR):
            if others[i] > key:
                before += 1
    for shift in cutlass.range_constexpr(MAX_SHARING):
        other = cute.arch.shuffle_sync_bfly(before, 1 << shift)
        before += other if shift < sharing else Int32(0)
    if number >= count or first > 0:
        number = Int32(-1)
    return number, before
