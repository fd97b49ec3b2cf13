"""The consumers' list of entries (key, position), its histogram, and sums over the consumers.

The histogram counts the entries that may win; others, of the key 0 and no position, lie in no
range, are never accepted, and go when the list is compacted.
"""

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.dsl.smem import store4
from flashdsa.dsl.warp import alloc_slot, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.bins import NO_POSITION, accepts, bin_of
from flashdsa.kernels.indexer.sm90.memory import SCRATCH_COUNT, SCRATCH_WARP_SUMS, Ranking
from flashdsa.kernels.indexer.sm90.plan import NUM_BINS, IndexerPlan

CONSUMER_BARRIER = 1
"""The named barrier among the consumers."""
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


@cute.jit
def count_in_bin(ranking: Ranking, bin_index: Int32) -> None:
    """Add one to a bin. The constant 1, unsigned, makes it the instruction that counts lanes."""
    cute.arch.inline_ptx(
        "red.relaxed.cta.shared::cta.add.u32 [{$r0}], 1;",
        read_only_args=[ranking.histogram.iterator + bin_index],
    )


@cute.jit
def clear_histogram(ranking: Ranking, thread: Int32, plan: cutlass.Constexpr) -> None:
    """All bins 0. The caller syncs before anyone counts."""
    nothing = cute.make_rmem_tensor(4, Int32)
    nothing.fill(0)
    for i in cutlass.range_constexpr(NUM_BINS // plan.consumer_threads // 4):
        store4(ranking.histogram, thread + i * plan.consumer_threads, nothing.load())


@cute.jit
def consumer_prefix(ranking: Ranking, value: Int32, thread: Int32, plan: cutlass.Constexpr):
    """(sum over the threads before this one, sum over all consumers). One consumer sync."""
    inclusive = prefix_sum(value, thread % WARP_SIZE)
    of_warp = cute.arch.shuffle_sync(inclusive, WARP_SIZE - 1)
    sums = warp_sums(ranking, of_warp, thread, plan)
    return before_warp(sums, thread) + inclusive - value, cute.arch.warp_redux_sync(sums, "add")


@cute.jit
def warp_sums(ranking: Ranking, of_warp: Int32, thread: Int32, plan: cutlass.Constexpr) -> Int32:
    """In lane i what warp i gave, 0 in the rest. One consumer sync."""
    lane = thread % WARP_SIZE
    if lane == 0:
        ranking.scratch[SCRATCH_WARP_SUMS + thread // WARP_SIZE] = of_warp
    consumer_sync(plan)
    sums = Int32(0)
    if lane < plan.consumer_warps:
        sums = ranking.scratch[SCRATCH_WARP_SUMS + lane]
    return sums


@cute.jit
def before_warp(sums: Int32, thread: Int32) -> Int32:
    """Of `warp_sums`, those of the warps before the caller's."""
    before = Int32(0)
    if thread % WARP_SIZE < thread // WARP_SIZE:
        before = sums
    return cute.arch.warp_redux_sync(before, "add")


@cute.jit
def append(ranking: Ranking, key: Uint32, position: Uint32, wanted: cutlass.Boolean) -> None:
    """Put an entry at the list's end and into the histogram; all lanes call."""
    index = alloc_slot(ranking.scratch.iterator + SCRATCH_COUNT, wanted)
    if wanted:
        ranking.keys[index] = Int32(key)
        ranking.positions[index] = Int32(position)
        count_in_bin(ranking, bin_of(key))


@cute.jit
def put(
    ranking: Ranking, index: Int32, key: Uint32, position: Int32, valid: cutlass.Boolean
) -> None:
    """An entry at its place; one that is not `valid` never wins and is not counted."""
    ranking.keys[index] = Int32(key) if valid else Int32(0)
    ranking.positions[index] = position if valid else Int32(NO_POSITION)
    if valid:
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
