"""Which rows a group of CTAs gets where clusters get several: longest first, evenly by work.

Every CTA weighs the lengths of all rows, up to ORDERED_ROWS of them, and all come to the same
results. Clusters are halved where that ends earlier: small groups take long rows slowly, large ones
rank more rows one after the other. If groups get several rows still, these are put in order and
dealt forwards and backwards in turns, which evens out the sums.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from flashdsa.dsl.smem import load4
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.bins import LAST_POSITION
from flashdsa.kernels.indexer.sm90.listing import consumer_sync
from flashdsa.kernels.indexer.sm90.memory import (
    SCRATCH_HALVINGS,
    SCRATCH_MOST_WORK,
    SCRATCH_OWN_WORK,
    SCRATCH_TALLY,
    Ranking,
)
from flashdsa.kernels.indexer.sm90.place import Place, dealt_to, most_halvings, split
from flashdsa.kernels.indexer.sm90.plan import ORDERED_ROWS, IndexerPlan
from flashdsa.kernels.indexer.sm90.segments import Rows, clamped, pages_to_score, raw_length

VECTOR = 4
"""Words that are loaded at once."""
MOST_ORDERED_PAGES = (1 << 22) - 1
"""Longer rows are as good as equally long."""
MAX_SHARING = 2
"""Halvings of the comparisons of a row, at most."""


class Tally(NamedTuple):
    """Of all rows."""

    pages: Int32  # to score
    longest: Int32  # pages of a row
    scored: Int32  # rows with pages to score


@cute.jit
def first_lengths(
    ranking: Ranking,
    rows: Rows,
    place: Place,
    thread: Int32,
    consumes: cutlass.Boolean,
    plan: cutlass.Constexpr,
) -> Int32:
    """What the thread needs first of what is in memory of the rows' lengths; the caller syncs.

    Of a producer's lane 0 that is the length of the row with the cluster's number. The other lanes
    ask for others: for a number that all lanes share ptxas would wait here, to keep it only once.
    Where rows are weighed a consumer gets the row with its own number.
    """
    row = place.group // place.teams + thread % WARP_SIZE
    if const_expr(plan.dealt):
        if place.weighed and consumes:
            row = thread
        if thread < len(Tally._fields):
            ranking.scratch[SCRATCH_TALLY + thread] = Int32(0)
    return raw_length(rows, row)


@cute.jit
def settle(
    ranking: Ranking,
    rows: Rows,
    place: Place,
    first_lengths: Int32,
    thread: Int32,
    consumes: cutlass.Boolean,
    plan: cutlass.Constexpr,
) -> Place:
    """All threads of a CTA: the place that the rows decide on, and its rows if they are ordered.

    Where there are too many to be weighed groups are as small as they can be.
    """
    if const_expr(plan.dealt):
        halvings = Int32(0)
        if place.weighed:
            if consumes:
                weigh_rows(ranking, rows, clamped(rows, first_lengths), thread, plan)
                consumer_sync(plan)
                # One warp decides: all would take four times as long.
                if thread < WARP_SIZE:
                    choose_groups(ranking, place, thread, plan)
            cute.arch.sync_threads()
            halvings = ranking.scratch[SCRATCH_HALVINGS]
        elif rows.count > place.groups:
            halvings = most_halvings(place)
        place = split(place, halvings)
        if place.weighed and rows.count > place.groups:
            if consumes:
                order_rows(ranking, rows, place, thread, plan)
            cute.arch.sync_threads()
    return place


@cute.jit
def weigh_rows(
    ranking: Ranking, rows: Rows, length: Int32, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """Consumers: the length of the row with the thread's number, its key, and all rows' tally.

    The keys are those of the order, by pages, then by row, and take the histogram's memory.
    """
    assert const_expr(plan.consumer_threads == ORDERED_ROWS)
    pages = cutlass.min(pages_to_score(length, plan), Int32(MOST_ORDERED_PAGES))
    # Of equally many pages the first row has the largest key.
    key = pages * ORDERED_ROWS + ORDERED_ROWS - 1 - thread
    ranking.histogram[thread] = key if thread < rows.count else Int32(-1)
    ranking.histogram[plan.consumer_threads + thread] = Int32(0)  # a group's work
    ranking.lengths[thread] = length
    lane = thread % WARP_SIZE
    if thread - lane < rows.count:
        total = cute.arch.warp_redux_sync(pages, "add")
        longest = cute.arch.warp_redux_sync(pages, "max")
        scored = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(pages > 0)))
        if lane == 0:
            tally = ranking.scratch.iterator + SCRATCH_TALLY
            cute.arch.atomic_add(tally, total, sem="relaxed", scope="cta")
            cute.arch.atomic_max(tally + 1, longest, sem="relaxed", scope="cta")
            cute.arch.atomic_add(tally + 2, scored, sem="relaxed", scope="cta")


@cute.jit
def choose_groups(ranking: Ranking, place: Place, lane: Int32, plan: cutlass.Constexpr) -> None:
    """One warp: how often clusters are to be halved, so that the last group ends first.

    That is the one with the longest row, or one of those with most rows, taken for average ones.
    Work is compared in pages of a whole cluster.
    """
    tally = Tally(*(ranking.scratch[SCRATCH_TALLY + i] for i in range(len(Tally._fields))))
    average = Int32(Float32(tally.pages) / Float32(cutlass.max(tally.scored, Int32(1))))
    turns = (tally.scored + place.groups - 1) // place.groups
    chosen, least = Int32(0), Int32(LAST_POSITION)
    for halvings in cutlass.range(most_halvings(place) + 1, unroll=1):
        rows = (turns + (1 << halvings) - 1) >> halvings
        longest = work_of(tally.longest << halvings, place, plan)
        most = cutlass.max(longest, rows * work_of(average << halvings, place, plan))
        if most < least:
            chosen, least = halvings, most
    if lane == 0:
        ranking.scratch[SCRATCH_HALVINGS] = chosen
        # Of any group, if each gets one row.
        alone = split(place, chosen)
        ranking.scratch[SCRATCH_MOST_WORK] = work_of(tally.longest, alone, plan)


def work_of(pages: Int32, place: Place, plan: IndexerPlan) -> Int32:
    """Of the place's group with a row of so many pages, in pages: what it could score while it
    ranks counts, too."""
    return pages + place.parts * plan.ranking_pages


@cute.jit
def order_rows(
    ranking: Ranking, rows: Rows, place: Place, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """Consumers: the caller's rows, longest first, its work, and most of any group's; the caller
    syncs."""
    work = ranking.histogram.iterator + plan.consumer_threads
    row, before = rank_of_row(ranking.histogram, rows, thread, plan)
    if row >= 0:
        group, turn = dealt_to(place, before)
        if group == place.group:
            ranking.own_rows[turn] = row
        pages = pages_to_score(ranking.lengths[row], plan)
        if pages > 0:
            cute.arch.atomic_add(
                work + group, work_of(pages, place, plan), sem="relaxed", scope="cta"
            )
    consumer_sync(plan)
    if thread < WARP_SIZE:
        most = Int32(0)
        # Words behind those of the groups are 0.
        vectors = (place.groups + VECTOR - 1) // VECTOR
        for four in cutlass.range(thread, vectors, WARP_SIZE, unroll=1):
            words = load4(ranking.histogram, plan.consumer_threads // VECTOR + four)
            for i in cutlass.range_constexpr(VECTOR):
                most = cutlass.max(most, words[i])
        most = cute.arch.warp_redux_sync(most, "max")
        if thread == 0:
            ranking.scratch[SCRATCH_MOST_WORK] = most
            ranking.scratch[SCRATCH_OWN_WORK] = (work + place.group).load()


@cute.jit
def rank_of_row(
    keys: cute.Tensor, rows: Rows, thread: Int32, plan: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """(a row, rows before it in the order) in as many threads as there are rows; else -1 first.

    In small batches two or four neighbouring threads share the comparisons.
    """
    sharing = Int32(0)
    for shift in cutlass.range_constexpr(1, MAX_SHARING + 1):
        if rows.count <= plan.consumer_threads >> shift:
            sharing = Int32(shift)
    row = thread >> sharing
    first = thread - (row << sharing)
    key = keys[row]
    before = Int32(0)
    # The keys of what is beyond the last row are -1 and come before nobody.
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
