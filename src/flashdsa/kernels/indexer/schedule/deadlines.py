"""Rows given out so that the last CTA ends early: deadlines are tried, and the best one is taken.

Times are in pages that a CTA scores. Rows that a group of CTAs does not end before a deadline are
*long*, at most as many as a warp has lanes: each gets clusters of its own, one or, if rows may be
split, as many as it takes, or as can merge what they publish. The others go to the groups of the
clusters that are left, forwards and backwards in turns, which evens out the sums. The result of
each deadline, for each number of halvings that makes groups of clusters, is computed from the rows
in their order; the deadline itself need not be met.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from flashdsa.dsl.warp import lowest_bit, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer import sizes, smem_views
from flashdsa.kernels.indexer.schedule import work_tile

LEAST_PART_PAGES = 8
"""Minimum pages per CTA of a split row, approximately."""
ORDER_BITS = sizes.MOST_WEIGHED.bit_length() - 1
"""Bits of a key below its pages."""
WARP_BITS = 4
"""Bits of a consumer warp's number."""
TIME_STEPS = 16
"""Steps of a page in which times are compared."""
MOST_TIME = (sizes.LAST_POSITION >> WARP_BITS) // TIME_STEPS
"""Longest time, in pages: longer ones compare as equal."""


class Tally(NamedTuple):
    """Sums over all rows."""

    pages: Int32  # to score
    longest: Int32  # pages of a row
    scored: Int32  # rows with pages to score


def least_time(coord: work_tile.Coord, tally: Tally, plan: Any) -> Float32:
    """Time at which all CTAs would end together, each having selected in rows of its own."""
    work = Float32(tally.pages) + Float32(tally.scored * plan.sharing.select_pages)
    return work * cute.arch.rcp_approx(Float32(coord.num_groups * coord.num_parts))


def deadline_of(least: Float32, number: Int32, plan: Any) -> Float32:
    """The deadline that a warp tries: from the least time, in growing steps, to one with hardly any
    long row."""
    step = Float32(number)
    grows = step * (Float32(0.04) + step * Float32(0.012))
    return least + (least + Float32(plan.sharing.merge_pages)) * grows


def key_at(select: smem_views.SelectBuffers, index: Int32) -> Int32:
    """Key of a row in the order."""
    return select.histogram[sizes.ORDERED_ROWS + index]


def pages_of(key: Int32) -> Float32:
    """Pages of the row with that key."""
    return Float32(key >> ORDER_BITS)


def key_of(pages: Int32, row: Int32) -> Int32:
    """Key of a row: of those with the same number of pages the first one has the largest."""
    return pages * sizes.MOST_WEIGHED + sizes.MOST_WEIGHED - 1 - row


def row_of(key: Int32) -> Int32:
    """Number of the row with that key."""
    return sizes.MOST_WEIGHED - 1 - (key & (sizes.MOST_WEIGHED - 1))


@cute.jit
def clusters_for(
    each: Float32, deadline: Float32, num_parts: Int32, plan: cutlass.Constexpr
) -> tuple[Int32, Float32]:
    """(clusters of a long row, its time), if each of the `num_parts` CTAs of one cluster had `each`
    pages."""
    clusters, time = Int32(1), each + Float32(plan.sharing.select_pages)
    if const_expr(plan.splits):
        left = deadline - Float32(plan.sharing.merge_pages)
        if time > deadline and left >= Float32(LEAST_PART_PAGES):
            clusters = Int32(each * cute.arch.rcp_approx(left)) + 1
            clusters = cutlass.min(clusters, num_parts * sizes.SPLITS_BY_SIZE)
            merge_pages = Float32(plan.sharing.merge_pages)
            time = each * cute.arch.rcp_approx(Float32(clusters)) + merge_pages
    return clusters, time


class LongRow(NamedTuple):
    """A lane's knowledge of one of the first rows in the order, for a deadline."""

    key: Int32
    is_long: cutlass.Boolean
    clusters: Int32  # 0: it is not long
    time: Int32  # in TIME_STEPS


@cute.jit
def long_row(
    select: smem_views.SelectBuffers,
    coord: work_tile.Coord,
    tally: Tally,
    halvings: Int32,
    deadline: Float32,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> LongRow:
    """Return the clusters and the time of the lane's row."""
    key, pages = Int32(0), Float32(0.0)
    if lane < tally.scored:
        key = key_at(select, lane)
        pages = pages_of(key)
    alone = pages * of_group(coord, halvings) + Float32(plan.sharing.select_pages)
    is_long = lane < tally.scored and alone > deadline
    each = pages * of_group(coord, Int32(0))
    clusters, time = clusters_for(each, deadline, coord.num_parts, plan)
    if not is_long:
        clusters, time = Int32(0), Float32(0.0)
    return LongRow(key, is_long, clusters, in_steps(time))


def of_group(coord: work_tile.Coord, halvings: Int32) -> Float32:
    """Share of each CTA of a group, if clusters are halved `halvings` times."""
    return cute.arch.rcp_approx(Float32(coord.num_parts >> halvings))


def in_steps(time: Float32) -> Int32:
    """A time as an integer."""
    return Int32(cutlass.min(time, Float32(MOST_TIME)) * Float32(TIME_STEPS))


class Division(NamedTuple):
    """Result of a deadline."""

    last: Int32  # when the last CTA ends, in TIME_STEPS; below it the warp
    halvings: Int32
    row: LongRow
    num_long: Int32
    needed: Int32  # clusters of long rows


@cute.jit
def division_for(
    select: smem_views.SelectBuffers,
    coord: work_tile.Coord,
    tally: Tally,
    halvings: Int32,
    warp: Int32,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> Division:
    """One warp: return the result of its deadline if clusters are halved `halvings` times."""
    deadline = deadline_of(least_time(coord, tally, plan), warp, plan)
    row = long_row(select, coord, tally, halvings, deadline, lane, plan)
    needed = cute.arch.warp_redux_sync(row.clusters, "add")
    num_long = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(row.is_long)))
    last = row.time
    groups = (coord.num_groups - needed) << halvings
    rest = tally.scored - num_long
    turns = Int32(Float32(rest) * cute.arch.rcp_approx(Float32(groups))) + 1
    usable = needed <= coord.num_groups and rest <= groups * sizes.MAX_OWN_ROWS
    if not usable or Float32(turns * plan.sharing.select_pages) > deadline + deadline:
        last = Int32(MOST_TIME * TIME_STEPS)
    elif rest > 0:
        # A lane adds up the time of one group, the first and the last among them.
        group = (groups - 1) * lane // (WARP_SIZE - 1)
        pages, rows = Int32(0), Int32(0)
        for turn in cutlass.range(turns, unroll=1):
            index = work_tile.index_of_turn(group, groups, turn)
            if index < rest:
                pages += key_at(select, num_long + index) >> ORDER_BITS
                rows += 1
        time = Float32(pages) * of_group(coord, halvings)
        last = cutlass.max(last, in_steps(time + Float32(rows * plan.sharing.select_pages)))
    last = cute.arch.warp_redux_sync(last, "max") << WARP_BITS | warp
    return Division(last, halvings, row, num_long, needed)


@cute.jit
def best_division(
    select: smem_views.SelectBuffers,
    coord: work_tile.Coord,
    tally: Tally,
    warp: Int32,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Division, Int32]:
    """Consumers, whose warps try a deadline each: (the warp's division, the earliest `last` of all
    warps' divisions)."""
    none = LongRow(Int32(0), cutlass.Boolean(False), Int32(0), Int32(0))
    best = Division(Int32(sizes.LAST_POSITION), Int32(0), none, Int32(0), Int32(0))
    halvings, most = Int32(0), work_tile.most_halvings(coord)
    while halvings <= most:
        other = division_for(select, coord, tally, halvings, warp, lane, plan)
        if other.last < best.last:
            best = other
        halvings += 1
        if tally.scored - other.num_long <= coord.num_groups - other.needed:
            halvings = most + 1  # smaller groups for rows that have a cluster each end later
    if lane == 0:
        select.scratch[smem_views.Scratch.WARP_SUMS + warp] = best.last
    # All consumers: the result of each deadline is available.
    smem_views.consumer_sync(plan)
    least = Int32(sizes.LAST_POSITION)
    if lane < plan.consumer_warps:
        least = select.scratch[smem_views.Scratch.WARP_SUMS + lane]
    return best, cute.arch.warp_redux_sync(least, "min")


@cute.jit
def give_out(
    select: smem_views.SelectBuffers,
    coord: work_tile.Coord,
    tally: Tally,
    division: Division,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """One warp, whose division is the best: write the coordinates of the caller's group to scratch,
    and its rows to own_rows."""
    row, halvings, most = division.row, division.halvings, division.last >> WARP_BITS
    num_long, needed = division.num_long, division.needed
    end = prefix_sum(row.clusters, lane)
    if most >= MOST_TIME * TIME_STEPS:  # no deadline is possible: no row is long
        num_long, needed, end = Int32(0), Int32(0), Int32(0)
    owner = cute.arch.vote_ballot_sync(end - row.clusters <= coord.group and coord.group < end)
    own = Int32(0)
    if owner != 0:
        at = lowest_bit(owner)
        clusters = cute.arch.shuffle_sync(row.clusters, at)
        first = cute.arch.shuffle_sync(end, at) - clusters
        own = cute.arch.shuffle_sync(row.time, at)
        key = cute.arch.shuffle_sync(row.key, at)
        if lane == 0:
            select.own_rows[0] = row_of(key)
        coord = coord._replace(turns=Int32(1))
        if const_expr(plan.splits):
            if clusters > 1:
                coord = coord._replace(
                    group=coord.group - first, num_groups=clusters, num_splits=clusters
                )
    else:
        coord = coord._replace(group=coord.group - needed, num_groups=coord.num_groups - needed)
        share = of_group(coord, halvings)
        coord = work_tile.split(coord, halvings)
        coord, own = take_turns(select, coord, tally, num_long, share, lane, plan)
    # SMs that together ask for more than device memory gives share it in proportion to what they
    # have in flight. An SM with less work than the last asks for less, so that all end together.
    inverse = cute.arch.rcp_approx(Float32(cutlass.max(most, Int32(1))))
    depth = Int32(Float32(plan.full_depth * own) * inverse) + 1
    depth = cutlass.min(cutlass.max(depth, Int32(sizes.DEPTH_STEPS)), Int32(plan.full_depth))
    coord = coord._replace(depth=depth)
    if lane == 0:
        for i in cutlass.range_constexpr(work_tile.COORD_WORDS):
            select.scratch[smem_views.Scratch.COORD + i] = coord[i]


@cute.jit
def take_turns(
    select: smem_views.SelectBuffers,
    coord: work_tile.Coord,
    tally: Tally,
    num_long: Int32,
    share: Float32,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> tuple[work_tile.Coord, Int32]:
    """One warp: list the caller's group's rows after the long ones; return (coordinates, time).
    share: part of a row that each CTA of the group scores."""
    time, turns = Float32(0.0), Int32(0)
    for block in cutlass.range_constexpr(sizes.MAX_OWN_ROWS // WARP_SIZE):
        turn = block * WARP_SIZE + lane
        index = num_long + work_tile.index_of_turn(coord.group, coord.num_groups, turn)
        has_row = index < tally.scored
        if has_row:
            key = key_at(select, index)
            select.own_rows[turn] = row_of(key)
            time += pages_of(key) * share + Float32(plan.sharing.select_pages)
        turns += Int32(cute.arch.popc(cute.arch.vote_ballot_sync(has_row)))
    own = cute.arch.warp_redux_sync(Int32(time * Float32(TIME_STEPS)), "add")
    return coord._replace(turns=turns), own
