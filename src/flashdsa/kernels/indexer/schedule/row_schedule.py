"""Which rows a group of CTAs gets where clusters get several: longest first, evenly by work.

Every CTA weighs the lengths of all rows, up to ORDERED_ROWS of them, and all come to the same
results. Clusters are halved if that ends earlier: small groups are slow with long rows, large ones
select more rows one after the other. If groups get several rows still, these are put in order and
given out forwards and backwards in turns, which evens out the sums.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from flashdsa.dsl.smem import VECTOR, load4
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import consumer_sync
from flashdsa.kernels.indexer.schedule.coord import Coord, group_of_row, most_halvings, split
from flashdsa.kernels.indexer.schedule.work_tile import Rows, clamped, pages_to_score, raw_length
from flashdsa.kernels.indexer.sizes import LAST_POSITION, ORDERED_ROWS
from flashdsa.kernels.indexer.smem_views import (
    SCRATCH_HALVINGS,
    SCRATCH_MOST_WORK,
    SCRATCH_OWN_WORK,
    SCRATCH_TALLY,
    SelectBuffers,
)

MOST_ORDERED_PAGES = (1 << 22) - 1
"""Rows with more pages than this count as equally long."""
MAX_SHARING = 2
"""Halvings of the comparisons of a row, at most."""


class Tally(NamedTuple):
    """Sums over all rows."""

    pages: Int32  # to score
    longest: Int32  # pages of a row
    scored: Int32  # rows with pages to score


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
    for the rows behind: if all lanes shared a number, ptxas would wait for it here, to keep it only
    once. If rows are weighed, a consumer gets the length of the row with its own thread number.
    """
    row = coord.group // coord.num_splits + thread % WARP_SIZE
    if const_expr(plan.scheduled):
        if coord.weighed and consumes:
            row = thread
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
    """All threads of a CTA: its coordinates as the rows' lengths decide, and its rows in scratch
    if they are ordered.

    With too many rows to be weighed, groups are as small as they can be.
    """
    if const_expr(plan.scheduled):
        halvings = Int32(0)
        if coord.weighed:
            if consumes:
                weigh_rows(select, rows, clamped(rows, first_lengths), thread, plan)
                consumer_sync(plan)
                # One warp decides: all would take four times as long.
                if thread < WARP_SIZE:
                    choose_groups(select, coord, thread, plan)
            # All threads of the CTA: halvings and the most work are in scratch, and all lengths.
            cute.arch.sync_threads()
            halvings = select.scratch[SCRATCH_HALVINGS]
        elif rows.count > coord.num_groups:
            halvings = most_halvings(coord)
        coord = split(coord, halvings)
        if coord.weighed and rows.count > coord.num_groups:
            if consumes:
                order_rows(select, rows, coord, thread, plan)
            # All threads of the CTA: the load warps may read own_rows and the work of the groups.
            cute.arch.sync_threads()
    return coord


@cute.jit
def weigh_rows(
    select: SelectBuffers, rows: Rows, length: Int32, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """Consumers: the length of the row with the thread's number, its key, and all rows' tally.

    The keys order the rows by pages, then by number, and overlay the histogram.
    """
    assert const_expr(plan.consumer_threads == ORDERED_ROWS)
    pages = cutlass.min(pages_to_score(length, plan), Int32(MOST_ORDERED_PAGES))
    # Among rows with the same number of pages the first one has the largest key.
    key = pages * ORDERED_ROWS + ORDERED_ROWS - 1 - thread
    select.histogram[thread] = key if thread < rows.count else Int32(-1)
    select.histogram[plan.consumer_threads + thread] = Int32(0)  # a group's work
    select.lengths[thread] = length
    lane = thread % WARP_SIZE
    if thread - lane < rows.count:
        total = cute.arch.warp_redux_sync(pages, "add")
        longest = cute.arch.warp_redux_sync(pages, "max")
        scored = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(pages > 0)))
        if lane == 0:
            tally = select.scratch.iterator + SCRATCH_TALLY
            cute.arch.atomic_add(tally, total, sem="relaxed", scope="cta")
            cute.arch.atomic_max(tally + 1, longest, sem="relaxed", scope="cta")
            cute.arch.atomic_add(tally + 2, scored, sem="relaxed", scope="cta")


@cute.jit
def choose_groups(
    select: SelectBuffers, coord: Coord, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """One warp: how often to halve clusters, so that the last group ends as early as it can.

    The last group is the one with the longest row, or one of those with most rows, which count as
    average ones. Work is compared in pages of a whole cluster.
    """
    tally = Tally(*(select.scratch[SCRATCH_TALLY + i] for i in range(len(Tally._fields))))
    average = Int32(Float32(tally.pages) / Float32(cutlass.max(tally.scored, Int32(1))))
    turns = (tally.scored + coord.num_groups - 1) // coord.num_groups
    chosen, least = Int32(0), Int32(LAST_POSITION)
    for halvings in cutlass.range(most_halvings(coord) + 1, unroll=1):
        rows = (turns + (1 << halvings) - 1) >> halvings
        longest = work_of(tally.longest << halvings, coord, plan)
        most = cutlass.max(longest, rows * work_of(average << halvings, coord, plan))
        if most < least:
            chosen, least = halvings, most
    if lane == 0:
        select.scratch[SCRATCH_HALVINGS] = chosen
        # The most work of any group, if each gets one row.
        alone = split(coord, chosen)
        select.scratch[SCRATCH_MOST_WORK] = work_of(tally.longest, alone, plan)


def work_of(pages: Int32, coord: Coord, plan: Any) -> Int32:
    """The work of the caller's group with a row of `pages`, in pages: those that it could score
    while it selects count, too."""
    return pages + coord.num_parts * plan.select_pages


@cute.jit
def order_rows(
    select: SelectBuffers, rows: Rows, coord: Coord, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """Consumers: the rows of the caller's group, longest first, its work, and the most work of any
    group; the caller syncs."""
    work = select.histogram.iterator + plan.consumer_threads
    row, before = order_of_row(select.histogram, rows, thread, plan)
    if row >= 0:
        group, turn = group_of_row(coord, before)
        if group == coord.group:
            select.own_rows[turn] = row
        pages = pages_to_score(select.lengths[row], plan)
        if pages > 0:
            cute.arch.atomic_add(
                work + group, work_of(pages, coord, plan), sem="relaxed", scope="cta"
            )
    consumer_sync(plan)
    if thread < WARP_SIZE:
        most = Int32(0)
        # The words behind those of the groups are 0.
        vectors = (coord.num_groups + VECTOR - 1) // VECTOR
        for four in cutlass.range(thread, vectors, WARP_SIZE, unroll=1):
            words = load4(select.histogram, plan.consumer_threads // VECTOR + four)
            for i in cutlass.range_constexpr(VECTOR):
                most = cutlass.max(most, words[i])
        most = cute.arch.warp_redux_sync(most, "max")
        if thread == 0:
            select.scratch[SCRATCH_MOST_WORK] = most
            select.scratch[SCRATCH_OWN_WORK] = (work + coord.group).load()


@cute.jit
def order_of_row(
    keys: cute.Tensor, rows: Rows, thread: Int32, plan: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """(a row, how many rows come before it in the order), in as many threads as there are rows;
    (-1, ...) in the others. In small batches two or four neighbouring threads share the comparisons
    of a row."""
    sharing = Int32(0)
    for shift in cutlass.range_constexpr(1, MAX_SHARING + 1):
        if rows.count <= plan.consumer_threads >> shift:
            sharing = Int32(shift)
    row = thread >> sharing
    first = thread - (row << sharing)
    key = keys[row]
    before = Int32(0)
    # Keys beyond the last row are -1: they come before no row.
    vectors = (rows.count + VECTOR - 1) // VECTOR
    for four in cutlass.range(first, vectors, 1 << sharing, unroll=2):
        others = load4(keys, four)
        for i in cutlass.range_constexpr(VECTOR):
            if others[i] > key:
                before += 1
    for shift in cutlass.range_constexpr(MAX_SHARING):
        other = cute.arch.shuffle_sync_bfly(before, 1 << shift)
        before += other if shift < sharing else Int32(0)
    if row >= rows.count or first > 0:
        row = Int32(-1)
    return row, before
