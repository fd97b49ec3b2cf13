"""Assignment of rows to groups of CTAs, and of CTAs to a row: by the lengths, on the device.

Every CTA weighs the lengths of all rows, and all come to the same results. One row per cluster is
kept if the lengths are even enough. Otherwise the rows are put in order, the longest first, and
given out so that the last CTA ends early: see deadlines.py.

A thread weighs one row, so there may be ORDERED_ROWS of them. Of more rows each request's are
weighed together, as if all were as long as the longest of them.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer import sizes
from flashdsa.kernels.indexer.schedule import deadlines, work_tile
from flashdsa.kernels.indexer.smem_views import Scratch, SelectBuffers, consumer_sync

MOST_ORDERED_PAGES = (1 << 31 - deadlines.ORDER_BITS) - 1
"""Rows with more pages than this count as equally long."""
OTHER_KEYS = sizes.NUM_BINS - sizes.ORDERED_ROWS
"""Words of the histogram in which keys are exchanged while they are sorted, beside the first
ones."""
EVEN = 1.25
"""Rows with a cluster each are even if the longest takes at most this factor of the least time of
all, plus the cost of splitting."""
EQUAL = 1.03
"""Rows are equal if the longest has at most this factor of their average."""


@cute.jit
def first_lengths(
    select: SelectBuffers,
    rows: work_tile.Rows,
    coord: work_tile.Coord,
    thread: Int32,
    consumes: cutlass.Boolean,
    plan: cutlass.Constexpr,
) -> Int32:
    """The length, as it is in memory, that the thread needs first; the caller syncs. Lane 0 of a
    load warp gets the length of the row with the cluster's number. Its other lanes ask for the next
    rows: if all lanes shared a number, ptxas would wait for it here, to keep it only once. A
    consumer, if rows are weighed, gets the length of the first row that it weighs."""
    row = thread % WARP_SIZE + coord.group
    if const_expr(plan.splits):
        if consumes:
            row = thread * coord.together
        if thread < len(deadlines.Tally._fields):
            select.scratch[Scratch.TALLY + thread] = Int32(0)
    return work_tile.raw_length(rows, row)


@cute.jit
def schedule_rows(
    select: SelectBuffers,
    rows: work_tile.Rows,
    coord: work_tile.Coord,
    first_lengths: Int32,
    thread: Int32,
    consumes: cutlass.Boolean,
    plan: cutlass.Constexpr,
) -> work_tile.Coord:
    """All threads of a CTA: return its coordinates as the rows' lengths decide. The rows of its
    group are in own_rows if they are given out by lengths. Groups are as small as they can be if
    the rows are too many to be weighed."""
    if const_expr(plan.splits):
        if coord.together > 0:
            key = Int32(-1)
            if consumes:
                length = work_tile.clamped(rows, first_lengths)
                key = weigh_rows(select, rows, coord.together, length, thread, plan)
            # All threads of the CTA: the tally is in scratch, and all lengths.
            cute.arch.sync_threads()
            tally = deadlines.Tally(
                *(select.scratch[Scratch.TALLY + i] for i in range(len(deadlines.Tally._fields)))
            )
            even = even_choice(rows, tally, coord, plan)
            if even.turns == 0:
                if consumes:
                    put_in_order(select, rows, coord.together, key, thread, plan)
                    consumer_sync(plan)
                    give_out_rows(select, coord, tally, thread, plan)
                # All threads of the CTA: coordinates and own_rows are written.
                cute.arch.sync_threads()
                coord = read_coord(select, coord)
            else:
                coord = in_batch_order(rows, coord, even, plan)
        else:
            coord = work_tile.split(coord, work_tile.most_halvings(coord))
            turns = (rows.count + coord.num_groups - 1) // coord.num_groups
            coord = coord._replace(turns=turns)
    return coord


@cute.jit
def give_out_rows(
    select: SelectBuffers,
    coord: work_tile.Coord,
    tally: deadlines.Tally,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Consumers: give the rows out so that the last CTA ends earliest."""
    lane, warp = thread % WARP_SIZE, cute.arch.make_warp_uniform(thread // WARP_SIZE)
    best, least = deadlines.best_division(select, coord, tally, warp, lane, plan)
    if best.last == least:
        deadlines.give_out(select, coord, tally, best, lane, plan)


def read_coord(select: SelectBuffers, coord: work_tile.Coord) -> work_tile.Coord:
    """Read the coordinates that were given to the caller's group."""
    words = [select.scratch[Scratch.COORD + i] for i in range(work_tile.COORD_WORDS)]
    known = dict(zip(work_tile.Coord._fields, words, strict=False))
    return coord._replace(ordered=cutlass.Boolean(True), **known)


@cute.jit
def weigh_rows(
    select: SelectBuffers,
    rows: work_tile.Rows,
    together: Int32,
    length: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> Int32:
    """Consumers: write the length of the thread's first row, and all rows' tally; return the key of
    its rows, by which they are in the order of pages, then of numbers; -1 if it has none."""
    assert const_expr(plan.consumer_threads == sizes.ORDERED_ROWS)
    first = thread * together
    select.lengths[thread] = length
    for other in cutlass.range(first + 1, first + together, unroll=1):
        length = cutlass.max(length, work_tile.row_length(rows, other))
    pages = cutlass.min(work_tile.pages_to_score(rows, length), Int32(MOST_ORDERED_PAGES))
    lane = thread % WARP_SIZE
    if first - lane * together < rows.count:
        total = cute.arch.warp_redux_sync(pages * together, "add")
        longest = cute.arch.warp_redux_sync(pages, "max")
        scored = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(pages > 0)))
        if lane == 0:
            tally = select.scratch.iterator + Scratch.TALLY
            cute.arch.atomic_add(tally, total, sem="relaxed", scope="cta")
            cute.arch.atomic_max(tally + 1, longest, sem="relaxed", scope="cta")
            cute.arch.atomic_add(tally + 2, scored * together, sem="relaxed", scope="cta")
    return deadlines.key_of(pages, first) if first < rows.count else Int32(-1)


class Even(NamedTuple):
    """Distribution of rows that keep the batch's order."""

    halvings: Int32
    turns: Int32  # 0: they do not


@cute.jit
def even_choice(
    rows: work_tile.Rows, tally: deadlines.Tally, coord: work_tile.Coord, plan: cutlass.Constexpr
) -> Even:
    """Decide whether giving the rows out by lengths gains nothing, so that they keep the batch's
    order."""
    halvings, turns = Int32(0), Int32(0)
    if rows.count <= coord.num_groups:
        turns = Int32(1)
        if const_expr(plan.splits):
            least = Float32(EVEN) * deadlines.least_time(coord, tally, plan)
            longest = Float32(tally.longest) * deadlines.of_group(coord, Int32(0))
            if longest > least + Float32(plan.sharing.merge_pages - 2 * plan.sharing.select_pages):
                turns = Int32(0)
    elif tally.scored == rows.count and Float32(tally.longest) * Float32(tally.scored) <= Float32(
        EQUAL
    ) * Float32(tally.pages):
        least = Float32(0.0)
        for more in cutlass.range_constexpr(sizes.MAX_HALVINGS + 1):
            if more <= work_tile.most_halvings(coord):
                # The value is never a whole number, so that it need not be exact.
                of_groups = cute.arch.rcp_approx(Float32(coord.num_groups << more))
                needed = Int32((Float32(rows.count) - Float32(0.5)) * of_groups) + 1
                pages = Float32(tally.longest) * deadlines.of_group(coord, Int32(more))
                time = Float32(needed) * (pages + Float32(plan.sharing.select_pages))
                if more == 0 or time < least:
                    halvings, turns, least = Int32(more), needed, time
    return Even(halvings, turns)


@cute.jit
def in_batch_order(
    rows: work_tile.Rows, coord: work_tile.Coord, even: Even, plan: cutlass.Constexpr
) -> work_tile.Coord:
    """The caller's coordinates if clusters are halved that often. A group with one row fewer than
    others keeps fewer pages in flight, as in deadlines.py."""
    coord = work_tile.split(coord, even.halvings)
    depth = Int32(plan.full_depth)
    if even.turns > 1:
        last = work_tile.index_of_turn(coord.group, coord.num_groups, even.turns - 1)
        if last >= rows.count:
            share = cute.arch.rcp_approx(Float32(even.turns))
            depth -= Int32(Float32(plan.full_depth) * share)
            depth = cutlass.max(depth, Int32(sizes.DEPTH_STEPS))
    return coord._replace(turns=even.turns, depth=depth)


@cute.jit
def put_in_order(
    select: SelectBuffers,
    rows: work_tile.Rows,
    together: Int32,
    key: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Consumers: put the rows' keys, the largest first, after the first ORDERED_ROWS words. key: of
    the thread's rows; see `weigh_rows`."""
    assert const_expr(sizes.ORDERED_ROWS + sizes.MOST_WEIGHED <= OTHER_KEYS)
    count = rows.count
    if const_expr(rows.requests is not None):
        if together > 1:
            count = rows.requests
    key = sorted_key(select.histogram, key, count, thread, plan)
    if thread < count:
        for i in cutlass.range(together, unroll=1):
            select.histogram[sizes.ORDERED_ROWS + thread * together + i] = key - i


@cute.jit
def sorted_key(
    words: cute.Tensor, key: Int32, count: Int32, thread: Int32, plan: cutlass.Constexpr
) -> Int32:
    """The thread's key after a bitonic sort, the largest first, of a key of each consumer: those
    from `count` on are -1. Two sorted halves are merged from the comparison of one with the other
    in reverse on. Warps exchange keys in two places of `words`, by turns."""
    for bits in cutlass.range_constexpr(WARP_SIZE.bit_length() - 1):
        other = cute.arch.shuffle_sync_bfly(key, (2 << bits) - 1)
        key = chosen(key, other, thread & 1 << bits)
        key = merged_in_warp(key, thread, bits)
    size, place = Int32(2 * WARP_SIZE), Int32(0)
    while size < 2 * count:
        apart, flipped = size // 2, size - 1
        while apart >= WARP_SIZE:
            words[place + thread] = key
            # All consumers: every key is there. It is read before the sync after the next one,
            # which comes before anything else is written to its place.
            consumer_sync(plan)
            key = chosen(key, words[place + (thread ^ flipped)], thread & apart)
            place = OTHER_KEYS - place
            apart = apart // 2
            flipped = apart
        key = merged_in_warp(key, thread, WARP_SIZE.bit_length() - 1)
        size = size * 2
    return key


@cute.jit
def merged_in_warp(key: Int32, thread: Int32, bits: cutlass.Constexpr) -> Int32:
    """The end of the merge of 2**bits neighbouring keys."""
    for bit in cutlass.range_constexpr(bits - 1, -1, -1):
        key = chosen(key, cute.arch.shuffle_sync_bfly(key, 1 << bit), thread & 1 << bit)
    return key


@cute.jit
def chosen(key: Int32, other: Int32, is_later: Int32) -> Int32:
    """The smaller of two keys in the later thread, the larger in the other one."""
    return cutlass.max(key, other) if is_later == 0 else cutlass.min(key, other)
