"""Device memory in which the CTAs of split rows meet: slots with entries, and counters.

Counters are 0 between launches; see tiles.py and shared_pairs.py. Each CTA that shares a pair's row
adds the entries of its part, by groups of bins. A row's floor is a key that `topk` of its entries
have at least: no entry below it wins. CTAs that wait for each other count the floor's group by
finer steps, too.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute

from flashdsa.dsl import gmem
from flashdsa.dsl.gmem import (
    add_relaxed,
    add_release,
    load2,
    load_acquire,
    load_relaxed,
    store2,
    store4,
)
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.smem import VECTOR, load4
from flashdsa.dsl.warp import alloc_slots, first_lane_where, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer import sizes
from flashdsa.kernels.indexer.schedule.work_tile import Sharers, WorkTile
from flashdsa.kernels.indexer.select.exchange import sum_groups
from flashdsa.kernels.indexer.select.keys import (
    SIGN,
    Part,
    accepts,
    between,
    highest_key,
    lowest_key,
    reach,
    signed,
    step_at,
    step_bits,
)
from flashdsa.kernels.indexer.select.lists import count_at, key_at, position_of
from flashdsa.kernels.indexer.select.threshold import Threshold
from flashdsa.kernels.indexer.smem_views import Scratch, Selecting, consumer_sync
from flashdsa.problem import PAGE_SIZE

PUBLISHED_TOGETHER = 4
"""Entries of a thread that it publishes with one atomic of its warp."""
CHUNKS_TOGETHER = 8
"""Chunks, of WARP_SIZE entries each, that a warp loads before it uses the first."""


class Published(NamedTuple):
    """Device memory of one launch at a time. Counters are 0 between launches."""

    arrivals: Any  # (B,) int32: CTAs of the row that have published
    headers: Any  # (slots, SLOT_HEADER_WORDS) int32: of each CTA one, or two, see `slot_number`
    entries: Any  # (slots, words) int32: keys and positions, by turns
    bins: Any  # (slots, PUBLISHED_BINS) int32: entries in bins, where CTAs split a row, of bin i in
    # place i modulo PUBLISHED_BINS; None: clusters do


class Header(NamedTuple):
    """Summary of the entries in a CTA's slot; keys are `signed` words."""

    count: Int32
    top: Int32  # the best key
    floor: Int32  # a key that `topk` entries of the row have at least
    first: Int32  # of a cluster the first position of the CTA's part; else the first group of
    # the PUBLISHED_GROUPS whose bins it counts


def published_in(arrivals: cute.Tensor, slots: cute.Tensor, plan: Any) -> Published:
    """The counters, and the parts of (slots, slot_words) int32: all headers lie before all entries,
    as a warp reads the headers of many slots at once."""
    count, places, tensors = slots.shape[0], slots.iterator, []
    for words in (
        sizes.SLOT_HEADER_WORDS,
        sizes.ENTRY_WORDS * plan.most_published,
        plan.published_bins,
    ):
        if words:
            layout = cute.make_layout((count, words), stride=(words, 1))
            tensors.append(cute.make_tensor(places, layout))
            places += count * words
        else:
            tensors.append(None)
    return Published(arrivals, *tensors)


@cute.jit
def entry_of(s: Selecting, number: Int32, index: Int32) -> Any:
    """Pointer to an entry of a slot: a CTA's, or the `slot_number` of a sharer."""
    words = const_expr(sizes.ENTRY_WORDS * s.plan.most_published)
    return s.published.entries.iterator + Int64(number) * words + sizes.ENTRY_WORDS * index


def header_of(s: Selecting, number: Int32) -> Any:
    """Pointer to the header of a slot."""
    return s.published.headers.iterator + sizes.SLOT_HEADER_WORDS * number


@cute.jit
def load_header(s: Selecting, number: Int32) -> Header:
    """A header that was published."""
    return Header(*gmem.load4(header_of(s, number)))


@cute.jit
def load_entry(s: Selecting, number: Int32, index: Int32) -> tuple[Int32, Int32]:
    """An entry that was published in a slot."""
    return load2(entry_of(s, number, index))


def chunks_of(entries: Int32) -> Int32:
    """Loads of a warp for `entries` entries."""
    return (entries + WARP_SIZE - 1) // WARP_SIZE


@cute.jit
def publish(
    s: Selecting, number: Int32, part: Part, threshold: Threshold, floor: Uint32, first: Int32
) -> None:
    """Write the part's entries as good as the threshold into a slot; one thread, the first, writes
    the header after a sync of all. Starts synced. floor, first: see `Header`."""
    select, thread, plan = s.select, s.thread, s.plan
    if thread == 0:
        select.scratch[Scratch.COUNT] = Int32(0)
        select.scratch[Scratch.TOP] = Int32(SIGN)
    # All consumers: the counts begin at 0.
    consumer_sync(plan)
    top = Int32(SIGN)
    block = PUBLISHED_TOGETHER * plan.consumer_threads
    for begin in cutlass.range(0, part.entries, block, unroll=1):
        keys, positions, wins, indices = (
            cute.make_rmem_tensor(PUBLISHED_TOGETHER, Int32) for _ in range(4)
        )
        for i in cutlass.range_constexpr(PUBLISHED_TOGETHER):
            index = begin + thread + i * plan.consumer_threads
            keys[i], positions[i], wins[i] = Int32(0), Int32(0), Int32(0)
            if index < part.entries:
                key = key_at(select, index)
                position = position_of(select, part, index, key)
                keys[i], positions[i] = Int32(key), Int32(position)
                wins[i] = Int32(accepts(key, position, threshold.key, threshold.position))
        alloc_slots(select.scratch.iterator + Scratch.COUNT, wins, indices, PUBLISHED_TOGETHER)
        for i in cutlass.range_constexpr(PUBLISHED_TOGETHER):
            if wins[i] != 0:
                store2(entry_of(s, number, indices[i]), keys[i], positions[i])
                top = cutlass.max(top, signed(Uint32(keys[i])))
    top = cute.arch.warp_redux_sync(top, "max")
    if thread % WARP_SIZE == 0:
        cute.arch.atomic_max(select.scratch.iterator + Scratch.TOP, top, sem="relaxed", scope="cta")
    # All consumers: the slot's entries are written, and counted.
    consumer_sync(plan)
    if thread == 0:
        scratch = select.scratch
        header = Header(scratch[Scratch.COUNT], scratch[Scratch.TOP], signed(floor), first)
        store4(header_of(s, number), header)


COUNTED_GROUPS, DIFFERING, COUNTED_STEPS = 1, 2, 3
"""Counters of a row, after its arrivals: CTAs that have counted their parts by groups of bins;
those that have seen different keys; the first of NARROWINGS: those that have counted by the steps
of a range."""
FLAG = 1 << 16
"""Added to a counter above its number of CTAs. To the arrivals: by a CTA that never waited; its
entries are in no step, which makes the others' floor lower, never wrong. To the CTAs that have
counted: by one that goes on without the others, which need not wait for it then."""
FIRST_STEP = sizes.ROW_COUNTERS - sizes.NARROWINGS * sizes.STEPS
"""The counter of the first range's first step."""
FIRST_COUNT = FIRST_STEP - sizes.BIN_GROUPS
"""The counter of the first group's entries."""
NEVER, IF_CROWDED, ALWAYS = range(3)
"""When a CTA waits for the counts of the row's other CTAs."""
STEP_BITS = sizes.STEPS.bit_length() - 1


def bins_of(s: Selecting, number: Int32) -> Any:
    """Pointer to the counts of bins of a slot."""
    return s.published.bins.iterator + sizes.PUBLISHED_BINS * number


@cute.jit
def slot_number(cta: Int32, index: Int32) -> Int32:
    """The slot in which a CTA publishes as the sharer `index` of a pair's row. A CTA has two slots:
    with a span it may be the first sharer of one row and a later one of another, before either is
    merged. Those of first sharers come after the others."""
    number = cta
    num_ctas, _, _ = cute.arch.grid_dim()
    if index == 0:
        number = cta + num_ctas
    return number


@cute.jit
def write_sharers(s: Selecting, sharers: Sharers) -> None:
    """One thread of a team: write its row's sharers for `sharers_of`. The team syncs before it
    reads them."""
    if s.thread == 0:
        words = (*sharers, Int32(0))  # a vector, as they are read
        for i in cutlass.range_constexpr(VECTOR):
            s.select.scratch[Scratch.SHARERS + i] = words[i]


def sharers_of(s: Selecting) -> Sharers:
    """The CTAs of the calling CTA's row: not kept in registers, as they are asked for once a
    row."""
    scratch = s.select.scratch
    return Sharers(*(scratch[Scratch.SHARERS + i] for i in range(len(Sharers._fields))))


@cute.jit
def own_slot(s: Selecting) -> Int32:
    """The slot in which the caller publishes its part of the row."""
    first, _, index = sharers_of(s)
    return slot_number(first + index, index)


def counters_of(s: Selecting) -> Any:
    """Pointer to the counters of the row that the calling CTA shares: arrivals first."""
    return s.published.arrivals.iterator + sharers_of(s).first * sizes.ROW_COUNTERS


@cute.jit
def contribute(s: Selecting, floor: Uint32, part: Part, waits: Int32) -> None:
    """Add the histogram, by groups of bins, to the row's counts, each entry once; write to scratch
    whether the row's floor is found, too, for `raise_threshold`. Ends synced. floor: of the list;
    not 0: some of it was contributed, see `keep_contributed`. waits: for the other CTAs' counts;
    see `waits_for_counts`."""
    select, cluster, thread, plan = s.select, s.cluster, s.thread, s.plan
    sum_groups(s)
    if thread == 0:
        select.scratch[Scratch.CROWDED], select.scratch[Scratch.CROWDED + 1] = Int32(0), Int32(0)
    # All consumers: own_coarse is complete.
    consumer_sync(plan)
    if thread < sizes.BIN_GROUPS:
        count = cluster.own_coarse[thread]
        if floor != 0:
            count -= cluster.coarse[thread]
        if count > 0:
            add_relaxed(counters_of(s) + FIRST_COUNT + thread, count)
    if waits != NEVER:
        look_for_a_crowd(s, part)
    # All consumers: own_coarse has been read, so that it may be written again.
    consumer_sync(plan)
    settles = opaque(Int32(waits == ALWAYS) | is_crowded(s))
    if thread == 0:
        select.scratch[Scratch.SETTLED] = settles
    if settles != 0:
        settle(s, part)


@cute.jit
def waits_for_counts(s: Selecting, tile: WorkTile, scored: cutlass.Boolean) -> Int32:
    """When the row's CTAs wait for each other's counts: the same in all of them whose part is
    `scored`."""
    sharing, ctas = s.plan.sharing, tile.num_splits
    pages = (tile.length + PAGE_SIZE - 1) // PAGE_SIZE
    waits = Int32(NEVER)
    if scored and ctas >= s.plan.crowded_ctas and pages >= ctas * sharing.crowded_pages:
        waits = Int32(IF_CROWDED)
        if ctas >= sharing.settling_ctas and pages >= ctas * sharing.settling_pages:
            waits = Int32(ALWAYS)
    return waits


@cute.jit
def look_for_a_crowd(s: Selecting, part: Part) -> None:
    """Consumers: count in scratch who has a bin with half of the part's entries, and who has
    another key than the first, among as many as they are. The parts of growing scores have several
    bins: those that wait would wait for others that do not."""
    select, thread, plan = s.select, s.thread, s.plan
    most = Int32(0)
    for i in cutlass.range_constexpr(sizes.NUM_BINS // VECTOR // plan.consumer_threads):
        four = load4(select.histogram, thread + i * plan.consumer_threads)
        for k in cutlass.range_constexpr(VECTOR):
            most = cutlass.max(most, four[k])
    if most * 2 >= part.entries:
        count_at(select.scratch, Int32(Scratch.CROWDED))
    if thread < part.entries and key_at(select, thread) != key_at(select, Int32(0)):
        count_at(select.scratch, Int32(Scratch.CROWDED + 1))


def is_crowded(s: Selecting) -> Int32:
    """Whether the caller has looked, and many of the part's entries have different keys of one bin,
    so that the row's floor can hardly be found by bins."""
    crowded, differ = (s.select.scratch[Scratch.CROWDED + i] for i in range(2))
    return Int32(crowded != 0) & Int32(differ != 0)


@cute.jit
def all_counted(counters: Any, which: Any, count: Int32, lane: Int32, plan: Any) -> cutlass.Boolean:
    """One warp, whose lanes have counted: whether all of the row's CTAs have, or do so before long,
    and none has gone on without the others, as far as the caller sees."""
    counted = Int32(0)
    cute.arch.sync_warp()
    if lane == 0:
        # A release of what the warp counted or saw counted by syncs before.
        add_release(counters + which, Int32(1))
        polls = Int32(0)
        while counted < count and polls < plan.sharing.count_polls:
            never_waited = load_acquire(counters) // FLAG
            counted = load_acquire(counters + which) + never_waited
            polls += 1
        if counted < count:
            add_relaxed(counters + which, Int32(FLAG))
    cute.arch.sync_warp()
    return cute.arch.shuffle_sync(Int32(counted == count), 0) == 1


@cute.jit
def settle(s: Selecting, part: Part) -> None:
    """Write the row's floor to scratch: a key that `topk` entries of the row have at least, and not
    many more if all CTAs count in time. Synced.

    The part is counted by groups. CTAs that come here narrow the range of the `topk`-th best, from
    that of its group on, to one of STEPS steps, as long as many entries are left, and as they see
    the same counts, they do so alike. An empty range ends that.
    """
    select, cluster, thread, plan = s.select, s.cluster, s.thread, s.plan
    if thread < sizes.STEPS:
        cluster.own_coarse[thread] = Int32(0)
    if thread < WARP_SIZE:
        begin_range(s, thread)
    # All consumers: the range is written, and no step has an entry.
    consumer_sync(plan)
    for narrowing in cutlass.range(sizes.NARROWINGS, unroll=1):
        low = Uint32(select.scratch[Scratch.RANGE])
        width = Uint32(select.scratch[Scratch.RANGE + 1]) - low
        if width != 0:
            shift = step_bits(width, STEP_BITS)
            for i in cutlass.range(thread, part.entries, plan.consumer_threads, unroll=1):
                key = key_at(select, i)
                if between(key, low, width):
                    count_at(cluster.own_coarse, Int32((key - low) >> Uint32(shift)))
            # All consumers: the part is counted by steps, and the range has been read.
            consumer_sync(plan)
            if thread < WARP_SIZE:
                narrow_range(s, narrowing, low, low + width, thread)
            # All consumers: the next range is written, and no step has an entry.
            consumer_sync(plan)


@cute.jit
def begin_range(s: Selecting, lane: Int32) -> None:
    """One warp: write the floor that the counts by groups allow, and the range of that group."""
    plan, counters = s.plan, counters_of(s)
    complete = all_counted(counters, COUNTED_GROUPS, sharers_of(s).count, lane, plan)
    group, above, within, floor = floor_group(s, counters, lane)
    high = floor
    # All CTAs that see all counts find the same group.
    if complete and above + within > 2 * plan.topk:
        high = highest_key(group * sizes.BIN_GROUP + sizes.BIN_GROUP - 1)
    if lane == 0:
        write_range(s, floor, high, above)


@cute.jit
def narrow_range(s: Selecting, narrowing: Int32, low: Uint32, high: Uint32, lane: Int32) -> None:
    """One warp, whose CTA has counted its part by the range's steps: narrow the range to one of
    them, and write its lowest key as the floor."""
    select, cluster, plan, counters = s.select, s.cluster, s.plan, counters_of(s)
    step = Int32(WARP_SIZE - 1) - lane  # lane 0 has the best one
    assert const_expr(sizes.STEPS == WARP_SIZE)
    counts = counters + (FIRST_STEP + narrowing * sizes.STEPS + lane)
    own = cluster.own_coarse[step]
    cluster.own_coarse[step] = Int32(0)
    if own > 0:
        add_relaxed(counts, own)
    if lane == 0 and narrowing == 0 and select.scratch[Scratch.CROWDED + 1] != 0:
        add_relaxed(counters + DIFFERING, Int32(1))
    above, count = select.scratch[Scratch.FOUND], sharers_of(s).count
    floor, last = low, low
    if all_counted(counters, COUNTED_STEPS + narrowing, count, lane, plan):
        own = load_relaxed(counts)
        inclusive = above + prefix_sum(own, lane)
        found = first_lane_where(inclusive >= plan.topk)
        # Entries that a compaction left out are not counted again, and cannot win.
        if cute.arch.shuffle_sync(inclusive, WARP_SIZE - 1) >= plan.topk:
            step = Int32(WARP_SIZE - 1) - found
            floor, last = step_at(low, high, step_bits(high - low, STEP_BITS), step)
            reached, within = (cute.arch.shuffle_sync(word, found) for word in (inclusive, own))
            # The row's last CTA lists no more at once; nothing narrows down equal keys.
            if reached <= plan.lists.capacity or load_relaxed(counters + DIFFERING) == 0:
                last = floor
            above = reached - within
    if lane == 0:
        write_range(s, floor, last, above)


def write_range(s: Selecting, low: Uint32, high: Uint32, above: Int32) -> None:
    """One thread: write a range of keys to scratch, the entries above it, and its lowest key as the
    row's floor."""
    scratch = s.select.scratch
    scratch[Scratch.FLOOR] = Int32(low)
    scratch[Scratch.RANGE], scratch[Scratch.RANGE + 1] = Int32(low), Int32(high)
    scratch[Scratch.FOUND] = above


@cute.jit
def keep_contributed(s: Selecting) -> None:
    """Record, after a compaction, that all entries of the list are contributed. Starts and ends
    synced. The record lies where other CTAs' counts come if CTAs share a row in the other way."""
    cluster, thread, plan = s.cluster, s.thread, s.plan
    sum_groups(s)
    # All consumers: own_coarse is complete.
    consumer_sync(plan)
    if thread < sizes.BIN_GROUPS:
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
        counts[i] = load_relaxed(counters + FIRST_COUNT + (VECTOR * quad + i))
    inclusive = prefix_sum(counts[0] + counts[1] + counts[2] + counts[3], lane)
    better = inclusive - counts[0] - counts[1] - counts[2] - counts[3]
    index, better, within = reach(counts, better, Int32(plan.topk))
    group = VECTOR * quad + index
    # The last lane, where the sum is not reached: all entries are above key 0.
    found = first_lane_where(inclusive >= plan.topk)
    floor = lowest_key(group * sizes.BIN_GROUP)
    if inclusive < plan.topk:
        floor = Uint32(0)
    return (
        cute.arch.shuffle_sync(group, found),
        cute.arch.shuffle_sync(better, found),
        cute.arch.shuffle_sync(within, found),
        Uint32(cute.arch.shuffle_sync(Int32(floor), found)),
    )
