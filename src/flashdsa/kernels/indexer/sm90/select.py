"""The k-th best of the list: histogram, refinement, comparison; exact, however many keys tie.

An entry is (key, position). Keys are scores as unsigned integers in the same order; of equal keys
the smaller position is better. A *threshold* is the last entry that is in: everything that is at
least as good is accepted.

The histogram's bins are a monotone function of the key: a window of 32 binary exponents around 1
with 32 bins each, for either sign; what lies outside falls into the end bins, which costs a
refinement, not exactness.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.kernels.indexer.sm90.memory import (
    SCRATCH_BIN,
    SCRATCH_CANDIDATES,
    SCRATCH_COUNT,
    SCRATCH_EXTREMES,
    SCRATCH_THRESHOLD,
    SCRATCH_WARP_SUMS,
    Ranking,
)
from flashdsa.kernels.indexer.sm90.plan import NO_POSITION, NUM_BINS, WARP_SIZE, IndexerPlan

CONSUMER_BARRIER = 1
"""The named barrier among the consumers."""
KEY_SHIFT = 18
"""Bits of a key below a bin: sign, 8 exponent bits and 5 mantissa bits stay."""
HALF_BINS = NUM_BINS // 2
MIDDLE = 1 << (31 - KEY_SHIFT)
"""Shifted key of +0."""
WINDOW_START = 112 * 32
"""Shifted magnitude of 2**-15, where the window begins."""
BIN_BITS = 11
LAST_POSITION = NO_POSITION - 1
COMPACTED_TOGETHER = 4
"""Entries of a thread in registers while the list is rewritten."""


def consumer_sync(plan: IndexerPlan) -> None:
    """All consumers wait for each other; their shared memory accesses are ordered by it."""
    cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=plan.consumer_threads)


def key_at(ranking: Ranking, index: Int32) -> Uint32:
    """Key of the list's entry."""
    return Uint32(ranking.keys[index])


def position_at(ranking: Ranking, index: Int32) -> Uint32:
    """Position of the list's entry."""
    return Uint32(ranking.positions[index])


def four_at(array: cute.Tensor, index: Int32) -> Any:
    """Elements 4 index to 4 index + 3 of an array in shared memory, in one load."""
    pointer = (array.iterator + 4 * index).align(16)
    return cute.make_tensor(pointer, cute.make_layout(4)).load()


@cute.jit
def bin_of(key: Uint32) -> Int32:
    """The key's bin."""
    signed = Int32(key >> KEY_SHIFT) - MIDDLE
    magnitude = signed ^ (signed >> 31)
    within = cutlass.min(cutlass.max(magnitude - WINDOW_START, Int32(0)), Int32(HALF_BINS - 1))
    return HALF_BINS + within if signed >= 0 else HALF_BINS - 1 - within


@cute.jit
def lowest_key(bin_index: Int32) -> Uint32:
    """The smallest key of a bin; of the bin behind the last one, a key that no score has."""
    shifted = MIDDLE + WINDOW_START + bin_index - HALF_BINS
    if bin_index < HALF_BINS:
        shifted = MIDDLE - 1 - (HALF_BINS - 1 - bin_index + WINDOW_START)
    if bin_index == HALF_BINS:
        shifted = Int32(MIDDLE)
    if bin_index <= 0:
        shifted = Int32(0)
    lowest = Uint32(shifted) << KEY_SHIFT
    if bin_index >= NUM_BINS:
        lowest = Uint32(0xFFFFFFFF)
    return lowest


@cute.jit
def highest_key(bin_index: Int32) -> Uint32:
    """The largest key of a bin."""
    return lowest_key(bin_index + 1) - 1


@cute.jit
def accepts(key: Uint32, position: Uint32, at_key: Uint32, at_position: Uint32) -> cutlass.Boolean:
    """Whether an entry is at least as good as the threshold."""
    return (key > at_key) or (key == at_key and position <= at_position)


@cute.jit
def count_in_bin(ranking: Ranking, bin_index: Int32) -> None:
    """Add one to a bin. The constant 1, unsigned, makes it the instruction that counts lanes."""
    cute.arch.inline_ptx(
        "red.relaxed.cta.shared::cta.add.u32 [{$r0}], 1;",
        read_only_args=[ranking.histogram.iterator + bin_index],
    )


@cute.jit
def take_place(ranking: Ranking, counter: cutlass.Constexpr, wanted: cutlass.Boolean) -> Int32:
    """A place of one's own among those who want one; one atomic a warp, all lanes call."""
    mask = cute.arch.vote_ballot_sync(wanted)
    base = Int32(0)
    if mask != 0:
        if cute.arch.lane_idx() == 0:
            base = cute.arch.atomic_add(
                ranking.scratch.iterator + counter,
                Int32(cute.arch.popc(mask)),
                sem="relaxed",
                scope="cta",
            )
        base = cute.arch.shuffle_sync(base, 0)
    return base + Int32(cute.arch.popc(mask & Int32(cute.arch.lanemask_lt())))


@cute.jit
def clear_histogram(ranking: Ranking, thread: Int32, plan: cutlass.Constexpr) -> None:
    """All bins 0. The caller syncs before anyone counts."""
    for i in cutlass.range_constexpr(NUM_BINS // plan.consumer_threads):
        ranking.histogram[thread + i * plan.consumer_threads] = Int32(0)


@cute.jit
def warp_prefix(value: Int32, lane: Int32) -> Int32:
    """Inclusive sum over the lanes up to this one."""
    total = value
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(total, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            total += other
    return total


@cute.jit
def consumer_prefix(ranking: Ranking, value: Int32, thread: Int32, plan: cutlass.Constexpr):
    """(sum over the threads before this one, sum over all consumers). One consumer sync."""
    lane = thread % WARP_SIZE
    warp = thread // WARP_SIZE
    inclusive = warp_prefix(value, lane)
    if lane == WARP_SIZE - 1:
        ranking.scratch[SCRATCH_WARP_SUMS + warp] = inclusive
    consumer_sync(plan)
    sums = Int32(0)
    if lane < plan.consumer_warps:
        sums = ranking.scratch[SCRATCH_WARP_SUMS + lane]
    total = cute.arch.warp_redux_sync(sums, "add")
    before = cute.arch.warp_redux_sync(sums if lane < warp else Int32(0), "add")
    return before + inclusive - value, total


@cute.jit
def find_bin(ranking: Ranking, rank: Int32, thread: Int32, plan: cutlass.Constexpr):
    """The bin of the entry with `rank` (1 = best): (bin, entries above it, entries in it).

    The histogram must be complete and synced, and must count at least `rank` entries.
    """
    assert plan.consumer_threads * 4 == NUM_BINS
    group = plan.consumer_threads - 1 - thread  # thread 0 has the best bins
    counts = four_at(ranking.histogram, group)
    mine = counts[0] + counts[1] + counts[2] + counts[3]
    before, _ = consumer_prefix(ranking, mine, thread, plan)
    if before < rank and before + mine >= rank:
        above = before
        chosen, within = Int32(3), counts[3]
        for i in cutlass.range_constexpr(2, -1, -1):
            if above + within < rank:
                above += within
                chosen, within = Int32(i), counts[i]
        ranking.scratch[SCRATCH_BIN] = 4 * group + chosen
        ranking.scratch[SCRATCH_BIN + 1] = above
        ranking.scratch[SCRATCH_BIN + 2] = within
    consumer_sync(plan)
    return (
        ranking.scratch[SCRATCH_BIN],
        ranking.scratch[SCRATCH_BIN + 1],
        ranking.scratch[SCRATCH_BIN + 2],
    )


class Range(NamedTuple):
    """Entries that may be the threshold: keys and places, both ends included.

    A place is an inverted position, so that a larger one is better, as with keys.
    """

    low: Uint32
    high: Uint32
    place_low: Uint32
    place_high: Uint32


@cute.jit
def inside(range_: Range, key: Uint32, place: Uint32) -> cutlass.Boolean:
    """Whether an entry is in the range."""
    return (
        key >= range_.low
        and key <= range_.high
        and place >= range_.place_low
        and place <= range_.place_high
    )


@cute.jit
def refine(
    ranking: Ranking,
    keys: cute.Tensor,
    positions: cute.Tensor,
    count: Int32,
    range_: Range,
    rank: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Range, Int32, Int32]:
    """Narrow the range to the part of it, one of up to 2048, that has the entry of `rank`.

    Keys are split first, places when one key is left. Returns range, rank in it, entries in it.
    """
    by_place = range_.low == range_.high
    base = range_.place_low if by_place else range_.low
    top = range_.place_high if by_place else range_.high
    shift = step_bits(top - base)
    clear_histogram(ranking, thread, plan)
    consumer_sync(plan)
    for i in cutlass.range(thread, count, plan.consumer_threads, unroll=1):
        key = Uint32(keys[i])
        place = ~Uint32(positions[i])
        if inside(range_, key, place):
            value = place if by_place else key
            count_in_bin(ranking, Int32((value - base) >> Uint32(shift)))
    consumer_sync(plan)
    chosen, above, within = find_bin(ranking, rank, thread, plan)
    low = base + (Uint32(chosen) << Uint32(shift))
    # Not min(low + step, top): that sum wraps around in the last bin below 2**32.
    high = low + cutlass.min((Uint32(1) << Uint32(shift)) - 1, top - low)
    narrowed = Range(
        low=range_.low if by_place else low,
        high=range_.high if by_place else high,
        place_low=low if by_place else range_.place_low,
        place_high=high if by_place else range_.place_high,
    )
    return narrowed, rank - above, within


@cute.jit
def add_candidate(ranking: Ranking, key: Uint32, position: Uint32) -> None:
    """Put an entry to the candidates; there is room."""
    index = cute.arch.atomic_add(
        ranking.scratch.iterator + SCRATCH_CANDIDATES, Int32(1), sem="relaxed", scope="cta"
    )
    ranking.candidate_keys[index] = Int32(key)
    ranking.candidate_positions[index] = Int32(position)


@cute.jit
def collect_candidates(
    ranking: Ranking, count: Int32, range_: Range, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """The list's entries in the range, at most max_candidates, to the candidates; synced."""
    if thread == 0:
        ranking.scratch[SCRATCH_CANDIDATES] = Int32(0)
    consumer_sync(plan)
    for i in cutlass.range(thread, count, plan.consumer_threads, unroll=4):
        key = key_at(ranking, i)
        if key >= range_.low and key <= range_.high:
            position = position_at(ranking, i)
            if ~position >= range_.place_low and ~position <= range_.place_high:
                add_candidate(ranking, key, position)
    consumer_sync(plan)


@cute.jit
def shrink_candidates(
    ranking: Ranking, count: Int32, range_: Range, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """Move the candidates in the range, at most max_compared, to the front; synced."""
    if thread == 0:
        ranking.scratch[SCRATCH_CANDIDATES] = Int32(0)
    key = Uint32(0)
    position = Uint32(0)
    wanted = cutlass.Boolean(False)
    if thread < count:
        key = Uint32(ranking.candidate_keys[thread])
        position = Uint32(ranking.candidate_positions[thread])
        wanted = inside(range_, key, ~position)
    consumer_sync(plan)
    if wanted:
        add_candidate(ranking, key, position)
    consumer_sync(plan)


@cute.jit
def rank_candidates(
    ranking: Ranking, count: Int32, rank: Int32, thread: Int32, plan: cutlass.Constexpr
) -> tuple[Uint32, Uint32]:
    """The candidate of `rank`, of at most max_compared: each is compared with each. Synced."""
    lanes_each = plan.consumer_threads // plan.max_compared
    index = thread // lanes_each
    key = Uint32(ranking.candidate_keys[index])
    position = Uint32(ranking.candidate_positions[index])
    better = Int32(0)
    for step in cutlass.range_constexpr(plan.max_compared // lanes_each):
        other = thread % lanes_each + step * lanes_each
        other_key = Uint32(ranking.candidate_keys[other])
        other_position = Uint32(ranking.candidate_positions[other])
        if other < count:
            if other_key > key or (other_key == key and other_position < position):
                better += 1
    for step in cutlass.range_constexpr(lanes_each.bit_length() - 1):
        better += cute.arch.shuffle_sync_bfly(better, 1 << step)
    if index < count and better == rank - 1:
        ranking.scratch[SCRATCH_THRESHOLD] = Int32(key)
        ranking.scratch[SCRATCH_THRESHOLD + 1] = Int32(position)
    consumer_sync(plan)
    return (
        Uint32(ranking.scratch[SCRATCH_THRESHOLD]),
        Uint32(ranking.scratch[SCRATCH_THRESHOLD + 1]),
    )


@cute.jit
def step_bits(width: Uint32) -> Int32:
    """By how much to shift values in [0, width] so that they number fewer than the bins."""
    return cutlass.max(Int32(32 - BIN_BITS) - Int32(cute.arch.clz(width)), Int32(0))


@cute.jit
def find_extremes(
    ranking: Ranking, count: Int32, range_: Range, thread: Int32, plan: cutlass.Constexpr
) -> Range:
    """The smallest range that has the same entries of the list: a plateau is one key at once."""
    least_key, greatest_key = Uint32(0xFFFFFFFF), Uint32(0)
    least_place, greatest_place = Uint32(0xFFFFFFFF), Uint32(0)
    for i in cutlass.range(thread, count, plan.consumer_threads, unroll=1):
        key = key_at(ranking, i)
        place = ~position_at(ranking, i)
        if inside(range_, key, place):
            least_key, greatest_key = cutlass.min(least_key, key), cutlass.max(greatest_key, key)
            least_place = cutlass.min(least_place, place)
            greatest_place = cutlass.max(greatest_place, place)
    if thread < 2:
        ranking.scratch[SCRATCH_EXTREMES + 2 * thread] = Int32(-1)
        ranking.scratch[SCRATCH_EXTREMES + 2 * thread + 1] = Int32(0)
    consumer_sync(plan)
    extremes = ranking.scratch.iterator + SCRATCH_EXTREMES
    least_key = cute.arch.warp_redux_sync(least_key, "umin")
    greatest_key = cute.arch.warp_redux_sync(greatest_key, "umax")
    least_place = cute.arch.warp_redux_sync(least_place, "umin")
    greatest_place = cute.arch.warp_redux_sync(greatest_place, "umax")
    if thread % WARP_SIZE == 0:
        atomic_extreme(extremes, least_key, "min")
        atomic_extreme(extremes + 1, greatest_key, "max")
        atomic_extreme(extremes + 2, least_place, "min")
        atomic_extreme(extremes + 3, greatest_place, "max")
    consumer_sync(plan)
    return Range(
        low=Uint32(ranking.scratch[SCRATCH_EXTREMES]),
        high=Uint32(ranking.scratch[SCRATCH_EXTREMES + 1]),
        place_low=Uint32(ranking.scratch[SCRATCH_EXTREMES + 2]),
        place_high=Uint32(ranking.scratch[SCRATCH_EXTREMES + 3]),
    )


@cute.jit
def atomic_extreme(pointer: Any, value: Uint32, which: cutlass.Constexpr) -> None:
    """Unsigned atomic minimum or maximum in shared memory."""
    cute.arch.inline_ptx(
        f"red.relaxed.cta.shared::cta.{which}.u32 [{{$r0}}], {{$r1}};",
        read_only_args=[pointer, value],
    )


@cute.jit
def find_threshold(
    ranking: Ranking,
    count: Int32,
    used: Int32,
    rank: Int32,
    counted: cutlass.Boolean,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Uint32, Uint32]:
    """The entry of `rank` among the list's first `count`, of which `used` are: (key, position).

    If `counted`, the histogram holds the bins of just these entries. It is destroyed. With `rank`
    used entries or fewer all of them are accepted. Ends synced.
    """
    at_key = Uint32(0)
    at_position = Uint32(LAST_POSITION)
    if used > rank:
        range_ = Range(
            Uint32(0), Uint32(0xFFFFFFFF), Uint32(0xFFFFFFFF - LAST_POSITION), Uint32(0xFFFFFFFF)
        )
        left = rank
        within = count
        if counted:
            chosen, above, within = find_bin(ranking, rank, thread, plan)
            range_ = Range(
                lowest_key(chosen), highest_key(chosen), range_.place_low, range_.place_high
            )
            left = rank - above
        if within > plan.max_candidates:
            range_ = find_extremes(ranking, count, range_, thread, plan)
            while within > plan.max_candidates:
                range_, left, within = refine(
                    ranking, ranking.keys, ranking.positions, count, range_, left, thread, plan
                )
        collect_candidates(ranking, count, range_, thread, plan)
        candidates = within
        while within > plan.max_compared:
            range_, left, within = refine(
                ranking,
                ranking.candidate_keys,
                ranking.candidate_positions,
                candidates,
                range_,
                left,
                thread,
                plan,
            )
        if within < candidates:
            shrink_candidates(ranking, candidates, range_, thread, plan)
        at_key, at_position = rank_candidates(ranking, within, left, thread, plan)
    consumer_sync(plan)
    return at_key, at_position


@cute.jit
def append(ranking: Ranking, key: Uint32, position: Uint32, wanted: cutlass.Boolean) -> None:
    """Put an entry at the list's end and into the histogram; all lanes call."""
    index = take_place(ranking, SCRATCH_COUNT, wanted)
    if wanted:
        ranking.keys[index] = Int32(key)
        ranking.positions[index] = Int32(position)
        count_in_bin(ranking, bin_of(key))


@cute.jit
def compact(
    ranking: Ranking,
    count: Int32,
    at_key: Uint32,
    at_position: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> Int32:
    """Keep the list's accepted entries only, in no special order; returns how many. Ends synced.

    The list is rewritten in place, a stretch at a time: a stretch is in registers before any of it
    is overwritten, and what is kept never reaches the next one.
    """
    clear_histogram(ranking, thread, plan)
    if thread == 0:
        ranking.scratch[SCRATCH_COUNT] = Int32(0)
    stretch = COMPACTED_TOGETHER * plan.consumer_threads
    for first in cutlass.range(0, count, stretch, unroll=1):
        keys = cute.make_rmem_tensor(COMPACTED_TOGETHER, Uint32)
        positions = cute.make_rmem_tensor(COMPACTED_TOGETHER, Uint32)
        for i in cutlass.range_constexpr(COMPACTED_TOGETHER):
            index = first + thread + i * plan.consumer_threads
            keys[i] = Uint32(0)
            positions[i] = Uint32(0)
            if index < count:
                keys[i] = key_at(ranking, index)
                positions[i] = position_at(ranking, index)
        consumer_sync(plan)
        for i in cutlass.range_constexpr(COMPACTED_TOGETHER):
            kept = first + thread + i * plan.consumer_threads < count and accepts(
                keys[i], positions[i], at_key, at_position
            )
            append(ranking, keys[i], positions[i], kept)
    consumer_sync(plan)
    entries = ranking.scratch[SCRATCH_COUNT]
    consumer_sync(plan)  # everyone has read the count
    return entries


@cute.jit
def reset(ranking: Ranking, thread: Int32, plan: cutlass.Constexpr) -> None:
    """An empty list; synced."""
    clear_histogram(ranking, thread, plan)
    if thread == 0:
        ranking.scratch[SCRATCH_COUNT] = Int32(0)
    consumer_sync(plan)
