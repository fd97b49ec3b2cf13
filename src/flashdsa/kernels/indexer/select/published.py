"""Device memory in which the CTAs of split rows meet: slots with entries, counters, and the floor
that follows from the counts.

See by_clusters.py and by_ctas.py. Counters are 0 between launches.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute

from flashdsa.dsl.gmem import add_relaxed, add_release, load2, load_acquire, load_relaxed
from flashdsa.dsl.smem import VECTOR
from flashdsa.dsl.warp import first_lane_where, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import Selecting, consumer_sync
from flashdsa.kernels.indexer.schedule.coord import Coord
from flashdsa.kernels.indexer.schedule.work_tile import Sharers, WorkTile
from flashdsa.kernels.indexer.select.exchange import sum_groups
from flashdsa.kernels.indexer.select.keys import lowest_key, reach
from flashdsa.kernels.indexer.sizes import BIN_GROUP, BIN_GROUPS, ROW_COUNTERS, SLOT_HEADER_WORDS
from flashdsa.kernels.indexer.smem_views import (
    SCRATCH_COORD,
    SCRATCH_FLOOR,
    SCRATCH_SHARERS,
)
from flashdsa.problem import PAGE_SIZE

COUNTED_GROUPS, COUNTED_BINS = 1, 2
"""Counters of a row: CTAs that have counted their parts by groups, and by bins."""
GONE = 1 << 16
"""Added to such a counter by a CTA that goes on without the others; they need not wait for it
then."""
FIRST_COUNT = ROW_COUNTERS - BIN_GROUPS - BIN_GROUP
"""The first group's counter among a row's counters."""


class Published(NamedTuple):
    """Device memory of one launch at a time. Counters are 0 between launches."""

    arrivals: Any  # (B,) int32: CTAs of the row that have published
    slots: Any  # (CTAs, slot_words) int32, or twice as many: see `slot_number`; a header, then keys
    # and positions: see sizes.py


@cute.jit
def slot_of(s: Selecting, number: Int32) -> Any:
    """Pointer to a slot: a CTA's, or the `slot_number` of a sharer."""
    published, plan = s.published, s.plan
    return published.slots.iterator + Int64(number) * plan.slot_words


@cute.jit
def slot_number(cta: Int32, index: Int32, plan: cutlass.Constexpr) -> Int32:
    """The slot in which a CTA publishes as the sharer `index` of a row.

    A CTA with a span may be the first sharer of one row and a later one of another, before either
    is merged: a first sharer has its slot behind those of all CTAs.
    """
    number = cta
    if const_expr(plan.cuts_spans):
        num_ctas, _, _ = cute.arch.grid_dim()
        if index == 0:
            number = cta + num_ctas
    return number


@cute.jit
def load_entry(s: Selecting, number: Int32, index: Int32) -> tuple[Int32, Int32]:
    """An entry that was published in a slot."""
    return load2(slot_of(s, number) + (SLOT_HEADER_WORDS + 2 * index))


@cute.jit
def write_sharers(s: Selecting, sharers: Sharers) -> None:
    """One thread of a team: write its row's sharers for `sharers_of`. The team syncs before it
    reads them."""
    if s.thread == 0:
        words = (*sharers, Int32(0))  # a vector, as they are read
        for i in cutlass.range_constexpr(VECTOR):
            s.select.scratch[SCRATCH_SHARERS + i] = words[i]


def sharers_of(s: Selecting) -> Sharers:
    """The CTAs of the calling CTA's row: not kept in registers, as they are asked for once a
    row."""
    scratch = s.select.scratch
    if s.plan.cuts_spans:
        return Sharers(*(scratch[SCRATCH_SHARERS + i] for i in range(len(Sharers._fields))))
    cta, _, _ = cute.arch.block_idx()
    own = scratch[SCRATCH_COORD + Coord._fields.index("group")]
    count = scratch[SCRATCH_COORD + Coord._fields.index("num_splits")]
    return Sharers(cta - own, count, own)


@cute.jit
def own_slot(s: Selecting) -> Any:
    """Pointer to the slot in which the caller publishes its part of the row."""
    cta, _, _ = cute.arch.block_idx()
    index = Int32(0)
    if const_expr(s.plan.cuts_spans):
        first, _, index = sharers_of(s)
        cta = first + index
    return slot_of(s, slot_number(cta, index, s.plan))


def counters_of(s: Selecting) -> Any:
    """Pointer to the counters of the row that the calling CTA shares: arrivals first."""
    return s.published.arrivals.iterator + sharers_of(s).first * ROW_COUNTERS


def group_counts(counters: Any) -> Any:
    """Pointer to the row's entries by groups of bins."""
    return counters + FIRST_COUNT


def bin_counts(counters: Any) -> Any:
    """Pointer to the row's entries by the bins of the group that has the `topk`-th best."""
    return counters + (FIRST_COUNT + BIN_GROUPS)


@cute.jit
def contribute(s: Selecting, floor: Uint32, settles: cutlass.Boolean) -> None:
    """Add the histogram, by groups of bins, to the row's counts, each entry once. Ends synced.

    Args:
        floor: of the list; not 0: some of it was contributed, see `keep_contributed`.
        settles: the part is complete, and the row's floor is found, too, for `raise_threshold`.
    """
    select, cluster, thread, plan = s.select, s.cluster, s.thread, s.plan
    sum_groups(s)
    # All consumers: own_coarse is complete.
    consumer_sync(plan)
    if thread < BIN_GROUPS:
        count = cluster.own_coarse[thread]
        if floor != 0:
            count -= cluster.coarse[thread]
        if count > 0:
            add_relaxed(group_counts(counters_of(s)) + thread, count)
    # All consumers: own_coarse has been read, so that it may be written again.
    consumer_sync(plan)
    if settles:
        if thread < WARP_SIZE:
            floor = final_floor(s, thread)
            if thread == 0:
                select.scratch[SCRATCH_FLOOR] = Int32(floor)
        # All consumers: the floor is written, and the histogram has been read.
        consumer_sync(plan)


@cute.jit
def counts_settle(s: Selecting, tile: WorkTile) -> cutlass.Boolean:
    """Whether the row's CTAs wait for each other's counts: the same in all of them."""
    sharing = s.plan.sharing
    pages = (tile.length + PAGE_SIZE - 1) // PAGE_SIZE
    return (
        tile.num_splits >= sharing.settling_ctas
        and pages >= tile.num_splits * sharing.settling_pages
    )


@cute.jit
def all_counted(
    counters: Any, which: cutlass.Constexpr, count: Int32, lane: Int32, plan: cutlass.Constexpr
) -> Int32:
    """One warp, whose lanes have counted: 1 if all of the row's CTAs have, or do so before long,
    and none has gone on without the others, as far as the caller sees."""
    counted = Int32(0)
    cute.arch.sync_warp()
    if lane == 0:
        # A release of what the warp counted or saw counted by syncs before.
        add_release(counters + which, Int32(1))
        polls = Int32(0)
        while counted < count and polls < plan.sharing.count_polls:
            counted = load_acquire(counters + which)
            polls += 1
        if counted < count:
            add_relaxed(counters + which, Int32(GONE))
    cute.arch.sync_warp()
    return cute.arch.shuffle_sync(Int32(counted == count), 0)


@cute.jit
def final_floor(s: Selecting, lane: Int32) -> Uint32:
    """One warp of a CTA whose part is counted by groups: return a key that `topk` entries of the
    row have at least. It is that of the bin of the `topk`-th best if all CTAs have counted theirs,
    and more than 2 topk entries have at least that key."""
    select, plan = s.select, s.plan
    counters, count = counters_of(s), sharers_of(s).count
    complete = all_counted(counters, COUNTED_GROUPS, count, lane, plan)
    group, above, within, floor = floor_group(s, counters, lane)
    if complete == 1 and above + within > 2 * plan.topk:
        # All CTAs that come here found the same group.
        bin_ = group * BIN_GROUP + WARP_SIZE - 1 - lane  # lane 0 has the best one
        assert const_expr(BIN_GROUP == WARP_SIZE)
        own = select.histogram[bin_]
        if own > 0:
            add_relaxed(bin_counts(counters) + lane, own)
        if all_counted(counters, COUNTED_BINS, count, lane, plan) == 1:
            inclusive = above + prefix_sum(load_relaxed(bin_counts(counters) + lane), lane)
            # Entries that a compaction left out are not counted again, and cannot win.
            found = first_lane_where(inclusive >= plan.topk)
            if cute.arch.shuffle_sync(inclusive, WARP_SIZE - 1) >= plan.topk:
                floor = lowest_key(group * BIN_GROUP + WARP_SIZE - 1 - found)
    return floor


@cute.jit
def keep_contributed(s: Selecting) -> None:
    """Record, after a compaction, that all entries of the list are contributed. Starts and ends
    synced.

    The record lies where other CTAs' counts come if CTAs share a row in the other way.
    """
    cluster, thread, plan = s.cluster, s.thread, s.plan
    sum_groups(s)
    # All consumers: own_coarse is complete.
    consumer_sync(plan)
    if thread < BIN_GROUPS:
        cluster.coarse[thread] = cluster.own_coarse[thread]
    consumer_sync(plan)


@cute.jit
def floor_group(s: Selecting, counters: Any, lane: Int32) -> tuple[Int32, Int32, Int32, Uint32]:
    """One warp: (the group of the row's `topk`-th best as far as it is counted, entries above it,
    its own, its lowest key); the key is 0 if the entries are fewer."""
    plan = s.plan
    quad = Int32(WARP_SIZE - 1) - lane  # lane 0 has the best groups
    counts = cute.make_rmem_tensor(VECTOR, Int32)
    for i in cutlass.range_constexpr(VECTOR):
        counts[i] = load_relaxed(group_counts(counters) + (VECTOR * quad + i))
    inclusive = prefix_sum(counts[0] + counts[1] + counts[2] + counts[3], lane)
    better = inclusive - counts[0] - counts[1] - counts[2] - counts[3]
    index, better, within = reach(counts, better, Int32(plan.topk))
    group = VECTOR * quad + index
    # The last lane, where the sum is not reached: all entries are above key 0.
    found = first_lane_where(inclusive >= plan.topk)
    floor = lowest_key(group * BIN_GROUP)
    if inclusive < plan.topk:
        floor = Uint32(0)
    return (
        cute.arch.shuffle_sync(group, found),
        cute.arch.shuffle_sync(better, found),
        cute.arch.shuffle_sync(within, found),
        Uint32(cute.arch.shuffle_sync(Int32(floor), found)),
    )
