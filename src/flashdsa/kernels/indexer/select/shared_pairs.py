"""A pair's row that several CTAs share: each selects alone in its part, and the last one merges.

The CTAs count the entries of their parts in device memory, by groups of bins, whenever a list is
full and at the end. These counts say which entries cannot win: those below `topk` better ones. A
CTA *publishes* the others, at most `topk` + max_candidates of them, into its own slot in device
memory. The one that comes last selects from what was published, slot after slot in the order of the
parts. No CTA has to wait for another. If many CTAs share a row and have long parts, or fewer do
whose scores are nearly equal, each gives the others a few microseconds at the end to count theirs,
so that all know which entries can win, and goes on without those that have not come. The timing
changes how much is published, but not the result.
"""

from typing import Any

import cutlass
from cutlass import Int32, Uint32, const_expr, cute

from flashdsa.dsl.gmem import load_relaxed
from flashdsa.dsl.warp import first_lane_where, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer import sizes
from flashdsa.kernels.indexer.select.exchange import find_kth
from flashdsa.kernels.indexer.select.keys import (
    BIN_BITS,
    SIGN,
    Part,
    bin_of,
    lowest_key,
    signed,
    step_bits,
    unsigned,
)
from flashdsa.kernels.indexer.select.lists import (
    Listed,
    append_all,
    clear_histogram,
    count_at,
    reset,
)
from flashdsa.kernels.indexer.select.published import (
    CHUNKS_TOGETHER,
    FLAG,
    bins_of,
    chunks_of,
    counters_of,
    floor_group,
    load_entry,
    load_header,
    own_slot,
    publish,
    sharers_of,
    slot_number,
)
from flashdsa.kernels.indexer.select.threshold import Threshold
from flashdsa.kernels.indexer.smem_views import Scratch, Selecting, consumer_sync, unpacked

SLOTS_A_LANE = sizes.LISTED_SLOTS // WARP_SIZE
"""Slots whose headers a lane reads at once."""
CHUNK_ENDS, CHUNK_OFFSETS = sizes.LISTED_SLOTS, 2 * sizes.LISTED_SLOTS
"""Offsets in the candidates' memory, after the slots' entries: of the chunks up to the end of each
slot, and of each chunk's offset."""
NOT_COUNTED = WARP_SIZE
"""Word of `own_coarse`, behind a group's bins: slots of the row whose entries are in no bin."""
SLOT_BITS = sizes.LISTED_SLOTS.bit_length()
SLOT_MASK = (1 << SLOT_BITS) - 1


@cute.jit
def raise_threshold(s: Selecting, threshold: Threshold, floor: Uint32) -> tuple[Threshold, Uint32]:
    """Return the threshold of the caller's part, raised as far as the row's counts allow, and the
    list's next floor. Ends synced. floor: of the list without these counts."""
    select, thread, plan = s.select, s.thread, s.plan
    if select.scratch[Scratch.SETTLED] == 0:
        if thread < WARP_SIZE:
            _, _, _, least = floor_group(s, counters_of(s), thread)
            if thread == 0:
                select.scratch[Scratch.FLOOR] = Int32(least)
        # All consumers: the row's floor is written.
        consumer_sync(plan)
    least = Uint32(select.scratch[Scratch.FLOOR])
    key, position = threshold.key, threshold.position
    if least > key:
        key, position, floor = least, Uint32(sizes.LAST_POSITION), cutlass.max(least, floor)
    # All consumers: the floor has been read, so that it may be written again.
    consumer_sync(plan)
    return threshold._replace(key=key, position=position), floor


@cute.jit
def publish_alone(s: Selecting, part: Part, threshold: Threshold) -> cutlass.Boolean:
    """Publish the part's entries that can win; return whether the caller is the row's last CTA to
    do so. Then the list is empty. Ends synced."""
    select, thread, plan = s.select, s.thread, s.plan
    first_group = bin_of(threshold.key) // sizes.BIN_GROUP
    if threshold.recounted:  # the histogram has no bins any more
        first_group = Int32(sizes.BIN_GROUPS)
    publish_bins(s, first_group * sizes.BIN_GROUP)
    # At least `topk` entries of the row have the threshold's key or a better one.
    publish(s, own_slot(s), part, threshold, threshold.key, first_group)
    if thread == 0:
        arrival = Int32(1)
        if select.scratch[Scratch.SETTLED] == 0:
            arrival += FLAG
        # A release of what all consumers wrote, by the sync before, and an acquire of what the CTAs
        # with smaller tickets wrote: the consumers may read all of it after the next sync.
        select.scratch[Scratch.TICKET] = cute.arch.atomic_add(
            counters_of(s), arrival, sem="acq_rel", scope="gpu"
        )
    consumer_sync(plan)
    is_last = select.scratch[Scratch.TICKET] % FLAG == sharers_of(s).count - 1
    if is_last:
        reset(s)
    return is_last


@cute.jit
def publish_bins(s: Selecting, first: Int32) -> None:
    """Write how many entries of the list bins have, from bin `first` on, into the caller's slot."""
    select, thread = s.select, s.thread
    assert const_expr(s.plan.consumer_threads >= sizes.PUBLISHED_BINS)
    bin_ = first + thread
    if thread < sizes.PUBLISHED_BINS and bin_ < sizes.NUM_BINS:
        (bins_of(s, own_slot(s)) + bin_ % sizes.PUBLISHED_BINS).store(select.histogram[bin_])


@cute.jit
def list_slots(s: Selecting, listed: Listed) -> Listed:
    """List what the row's CTAs published, from the first one on that is not listed, as long as the
    list has room. The first call makes the row's counters 0 again. Ends synced."""
    select, plan = s.select, s.plan
    fits = cutlass.Boolean(False)  # everything that reaches the floor is listed at once
    if listed.pages == 0:
        find_floor(s)
        fits = select.scratch[Scratch.FOUND] <= plan.lists.capacity
        # All consumers: what was found has been read, so that it may be overwritten.
        consumer_sync(plan)
    lists = cutlass.Boolean(True)
    while lists:
        listed = list_next_slots(s, listed, fits)
        lists = fits and listed.pages < sharers_of(s).count
    return listed


@cute.jit
def list_next_slots(s: Selecting, listed: Listed, fits: cutlass.Boolean) -> Listed:
    """List as many of the next slots as there is room for. Starts and ends synced. fits: everything
    that reaches the row's floor fits the list."""
    select, thread, plan = s.select, s.thread, s.plan
    first_cta = sharers_of(s).first + listed.pages
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    if thread < WARP_SIZE:
        read_headers(s, listed, fits, lane)
    # All consumers: how many slots fit, how many entries each has, and their chunks.
    consumer_sync(plan)
    if listed.pages == 0:
        # Every CTA of the row has read the counts: the others before their tickets.
        if thread < sizes.ROW_COUNTERS:
            (counters_of(s) + thread).store(Int32(0))
    fitting, chunks = select.scratch[Scratch.FOUND], select.scratch[Scratch.CHUNKS]
    floor = Uint32(select.scratch[Scratch.FLOOR])
    find_chunks(s, chunks)
    # All consumers: every chunk's offset is known.
    consumer_sync(plan)
    warps = plan.consumer_warps
    for first in cutlass.range(warp, chunks, CHUNKS_TOGETHER * warps, unroll=1):
        keys = cute.make_rmem_tensor(CHUNKS_TOGETHER, Int32)
        positions = cute.make_rmem_tensor(CHUNKS_TOGETHER, Int32)
        # All loads are under way before the first one is waited for.
        for i in cutlass.range_constexpr(CHUNKS_TOGETHER):
            keys[i], positions[i] = Int32(0), Int32(0)
            chunk = first + i * warps
            if chunk < chunks:
                offset = select.candidates[CHUNK_OFFSETS + chunk]
                slot, at = offset & SLOT_MASK, (offset >> SLOT_BITS) * WARP_SIZE + lane
                if at < select.candidates[slot]:
                    number = slot_number(first_cta + slot, listed.pages + slot)
                    keys[i], positions[i] = load_entry(s, number, at)
        wanted = cute.make_rmem_tensor(CHUNKS_TOGETHER, Int32)
        for i in cutlass.range_constexpr(CHUNKS_TOGETHER):
            # Entries that can win have no key 0.
            wanted[i] = Int32(keys[i] != 0 and Uint32(keys[i]) >= floor)
        append_all(select, keys, positions, wanted, CHUNKS_TOGETHER)
    # All consumers: the list is complete.
    consumer_sync(plan)
    entries = select.scratch[Scratch.COUNT]
    consumer_sync(plan)  # everyone has read the count, so that it may be written again
    return Listed(entries, listed.pages + fitting, floor)


@cute.jit
def find_floor(s: Selecting) -> None:
    """Write the row's floor to scratch, and how many of its entries have that key at least. The
    row's last CTA calls, so that all counts are complete. Starts and ends synced.

    The floor is that of a group of bins, or, where that leaves more entries than the list holds,
    that of a bin: the slots have counts of the group's bins, which are complete above a CTA's own
    floor. A slot without counts makes the floor lower, never wrong, but the number of entries that
    reach it is not known then. Where that leaves too many, what was published is counted by finer
    steps. CTAs that waited for each other know a better floor.
    """
    select, cluster, thread, plan = s.select, s.cluster, s.thread, s.plan
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    assert const_expr(sizes.BIN_GROUP == WARP_SIZE)
    if thread < WARP_SIZE:
        cluster.own_coarse[thread] = Int32(0)
        group, above, within, least = floor_group(s, counters_of(s), thread)
        if thread == 0:
            cluster.own_coarse[NOT_COUNTED] = Int32(0)
            select.scratch[Scratch.FLOOR] = Int32(least)
            select.scratch[Scratch.FOUND] = above + within
            select.scratch[Scratch.RANGE], select.scratch[Scratch.RANGE + 1] = group, above
    # All consumers: the group is in scratch, and its bins are clear.
    consumer_sync(plan)
    many = select.scratch[Scratch.FOUND] > plan.lists.capacity
    if many and select.scratch[Scratch.SETTLED] == 0:
        group = select.scratch[Scratch.RANGE]
        first, count, _ = sharers_of(s)
        entries = Int32(0)
        for index in cutlass.range(warp, count, plan.consumer_warps, unroll=4):
            number = slot_number(first + index, index)
            _, _, _, first_group = load_header(s, number)
            bin_ = group % sizes.PUBLISHED_GROUPS * sizes.BIN_GROUP + lane
            own = load_relaxed(bins_of(s, number) + bin_)
            if group >= first_group and group < first_group + sizes.PUBLISHED_GROUPS:
                entries += own
            if first_group >= sizes.BIN_GROUPS and lane == 0:
                count_at(cluster.own_coarse, Int32(NOT_COUNTED))
        if entries > 0:
            cute.arch.atomic_add(
                cluster.own_coarse.iterator + lane, entries, sem="relaxed", scope="cta"
            )
        # All consumers: the group's bins are counted.
        consumer_sync(plan)
        if thread < WARP_SIZE:
            bin_ = Int32(sizes.BIN_GROUP - 1) - lane  # lane 0 has the best one
            reached = prefix_sum(cluster.own_coarse[bin_], lane) + select.scratch[Scratch.RANGE + 1]
            if lane == first_lane_where(reached >= plan.topk) and reached >= plan.topk:
                select.scratch[Scratch.FLOOR] = Int32(lowest_key(group * sizes.BIN_GROUP + bin_))
                if cluster.own_coarse[NOT_COUNTED] == 0:
                    select.scratch[Scratch.FOUND] = reached
        # All consumers: the floor is written, and nobody reads what a group's was.
        consumer_sync(plan)
        if select.scratch[Scratch.FOUND] > plan.lists.capacity:
            count_published(s)
    # All consumers: the floor and what reaches it are written.
    consumer_sync(plan)


@cute.jit
def count_published(s: Selecting) -> None:
    """Raise the row's floor to a step of the keys that were published, from the floor to the best,
    and write how many entries reach it. The histogram is clear before and after; the caller syncs.
    Many scores in one bin would be listed, and cut down, a few slots at a time otherwise."""
    select, thread, plan = s.select, s.thread, s.plan
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    first, count, _ = sharers_of(s)
    low, high = signed(Uint32(select.scratch[Scratch.FLOOR])), Int32(SIGN)
    for index in cutlass.range(lane, count, WARP_SIZE, unroll=1):
        _, top, own, _ = load_header(s, slot_number(first + index, index))
        low, high = cutlass.max(low, own), cutlass.max(high, top)
    low = cute.arch.warp_redux_sync(low, "max")
    high = cute.arch.warp_redux_sync(high, "max")
    if high > low:  # the same in all warps; nothing tells equal keys apart
        floor = unsigned(low)
        shift = step_bits(unsigned(high) - floor, BIN_BITS)
        for index in cutlass.range(warp, count, plan.consumer_warps, unroll=1):
            number = slot_number(first + index, index)
            entries, _, _, _ = load_header(s, number)
            for begin in cutlass.range(lane, entries, CHUNKS_TOGETHER * WARP_SIZE, unroll=1):
                keys = cute.make_rmem_tensor(CHUNKS_TOGETHER, Int32)
                for i in cutlass.range_constexpr(CHUNKS_TOGETHER):
                    keys[i] = Int32(0)
                    if begin + i * WARP_SIZE < entries:
                        keys[i], _ = load_entry(s, number, begin + i * WARP_SIZE)
                for i in cutlass.range_constexpr(CHUNKS_TOGETHER):
                    if signed(Uint32(keys[i])) >= low:
                        step = (Uint32(keys[i]) - floor) >> Uint32(shift)
                        count_at(select.histogram, Int32(step))
        # All consumers: what was published is counted.
        consumer_sync(plan)
        found = find_kth(unpacked(s), cutlass.Boolean(False), Int32(plan.topk), Int32(0))
        clear_histogram(s)
        # All consumers: what was found has been read, so that it may be overwritten.
        consumer_sync(plan)
        if thread == 0:
            select.scratch[Scratch.FLOOR] = Int32(floor + (Uint32(found.bin) << Uint32(shift)))
            select.scratch[Scratch.FOUND] = found.above + found.within


@cute.jit
def read_headers(s: Selecting, listed: Listed, fits: cutlass.Boolean, lane: Int32) -> None:
    """One warp: write to scratch how many of the next slots fit the list, how many chunks they
    have, and the list's floor; write to the candidates' memory the entries of each, and the chunks
    up to its end. The row's floor and the slots' own say what cannot win, and whether the rest
    fits, however much was published."""
    select, plan, done = s.select, s.plan, listed.pages
    first_cta = sharers_of(s).first + done
    num_slots = cutlass.min(sharers_of(s).count - done, Int32(sizes.LISTED_SLOTS))
    counts, tops = (cute.make_rmem_tensor(SLOTS_A_LANE, Int32) for _ in range(2))
    floor = signed(listed.floor)
    for i in cutlass.range_constexpr(SLOTS_A_LANE):
        counts[i], tops[i] = Int32(0), Int32(SIGN)
        if SLOTS_A_LANE * lane + i < num_slots:
            cta, index = (start + SLOTS_A_LANE * lane + i for start in (first_cta, done))
            counts[i], tops[i], own, _ = load_header(s, slot_number(cta, index))
            floor = cutlass.max(floor, own)
    most_entries = Int32(plan.lists.capacity)
    if fits:
        most_entries = Int32(sizes.LAST_POSITION)
    if done == 0:
        floor = cutlass.max(floor, signed(Uint32(select.scratch[Scratch.FLOOR])))
    floor = cute.arch.warp_redux_sync(floor, "max")
    entries, chunks = Int32(0), Int32(0)
    for i in cutlass.range_constexpr(SLOTS_A_LANE):
        # A slot of which nothing can win any more is passed over.
        counts[i] = counts[i] if tops[i] >= floor else Int32(0)
        entries += counts[i]
        chunks += chunks_of(counts[i])
    end = listed.entries + prefix_sum(entries, lane) - entries
    chunk_end, fitting = prefix_sum(chunks, lane) - chunks, Int32(0)
    used = Int32(0)  # chunks up to the last slot that fits
    for i in cutlass.range_constexpr(SLOTS_A_LANE):
        end += counts[i]
        chunk_end += chunks_of(counts[i])
        fits = end <= most_entries and chunk_end <= most_chunks(plan)
        if SLOTS_A_LANE * lane + i < num_slots and fits:
            fitting += 1
            used = chunk_end
        else:
            counts[i] = Int32(0)
        select.candidates[SLOTS_A_LANE * lane + i] = counts[i]
        select.candidates[CHUNK_ENDS + SLOTS_A_LANE * lane + i] = chunk_end
    fitting = cute.arch.warp_redux_sync(fitting, "add")
    used = cute.arch.warp_redux_sync(used, "max")
    cute.arch.sync_warp()  # all lanes have read the floor and what it leaves
    if lane == 0:
        select.scratch[Scratch.FOUND], select.scratch[Scratch.CHUNKS] = fitting, used
        select.scratch[Scratch.FLOOR] = Int32(unsigned(floor))


def most_chunks(plan: Any) -> int:
    """Chunks whose offsets the candidates' memory has room for."""
    return int(plan.candidate_words) - CHUNK_OFFSETS


@cute.jit
def find_chunks(s: Selecting, chunks: Int32) -> None:
    """Consumers: write each chunk's slot, and its number in the slot, to the candidates' memory. A
    thread searches for one or two, among the chunks up to the end of each slot."""
    select, thread, plan = s.select, s.thread, s.plan
    for first in cutlass.range_constexpr(0, most_chunks(plan), plan.consumer_threads):
        chunk = thread + first
        if chunk < chunks:
            slot = Int32(0)  # number of slots that end before the chunk
            for bit in cutlass.range_constexpr(SLOT_BITS - 1, -1, -1):
                other = slot + (1 << bit)
                if other <= sizes.LISTED_SLOTS:
                    if select.candidates[CHUNK_ENDS + other - 1] <= chunk:
                        slot = other
            start = Int32(0)
            if slot > 0:
                start = select.candidates[CHUNK_ENDS + slot - 1]
            select.candidates[CHUNK_OFFSETS + chunk] = slot | (chunk - start) << SLOT_BITS
