"""Lists of rows in pairs: a segment for each warp that lists scores, filled from its front.

Nothing follows a segment's last entry, or, if the list is full or complete, entries that never win.
The row's scratch has the number of entries of each segment.
"""

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.dsl.smem import VECTOR, store4
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import Selecting, consumer_sync
from flashdsa.kernels.indexer.select.keys import accepts, bin_of
from flashdsa.kernels.indexer.select.lists import clear_histogram, count_in_bin, key_at, position_at
from flashdsa.kernels.indexer.select.threshold import Threshold
from flashdsa.kernels.indexer.sizes import NUM_BINS
from flashdsa.kernels.indexer.smem_views import SCRATCH_RECOUNTED, SCRATCH_SEGMENTS

READ_TOGETHER = 4
"""Entries of a lane in registers while a segment is rewritten."""


@cute.jit
def compact_segments(s: Selecting, threshold: Threshold) -> None:
    """Keep only the accepted entries, each segment in its order. Starts and ends synced.

    Unless the search has recounted, the histogram has all entries, and the threshold is a bin's
    lowest key: the bins that stay are right.
    """
    select, thread, plan = s.select, s.thread, s.plan
    recounted = select.scratch[SCRATCH_RECOUNTED] != 0
    if not recounted:
        clear_bins_below(s, bin_of(threshold.key))
    else:
        clear_histogram(s)
        # All consumers: the histogram is empty.
        consumer_sync(plan)
    lane = thread % WARP_SIZE
    segments = plan.list_capacity // plan.segment_entries
    for segment in cutlass.range(thread // WARP_SIZE, segments, plan.consumer_warps, unroll=1):
        begin = segment * plan.segment_entries
        end = begin + select.scratch[SCRATCH_SEGMENTS + segment]
        kept = begin
        for first in cutlass.range(begin, end, READ_TOGETHER * WARP_SIZE, unroll=1):
            keys = cute.make_rmem_tensor(READ_TOGETHER, Uint32)
            positions = cute.make_rmem_tensor(READ_TOGETHER, Uint32)
            for i in cutlass.range_constexpr(READ_TOGETHER):
                index = first + i * WARP_SIZE + lane
                keys[i], positions[i] = Uint32(0), Uint32(0)
                if index < end:
                    keys[i], positions[i] = key_at(select, index), position_at(select, index)
            # All lanes have read their entries, over which others are written.
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(READ_TOGETHER):
                keeps = first + i * WARP_SIZE + lane < end and accepts(
                    keys[i], positions[i], threshold.key, threshold.position
                )
                mask = Int32(cute.arch.vote_ballot_sync(keeps))
                slot = kept + Int32(cute.arch.popc(mask & Int32(cute.arch.lanemask_lt())))
                kept += Int32(cute.arch.popc(mask))
                if keeps:
                    select.keys[slot] = Int32(keys[i])
                    select.positions[slot] = Int32(positions[i])
                    if recounted:
                        count_in_bin(select, bin_of(keys[i]))
        if lane == 0:
            select.scratch[SCRATCH_SEGMENTS + segment] = kept - begin
    # All consumers: the list is as it is to be.
    consumer_sync(plan)


@cute.jit
def clear_bins_below(s: Selecting, first: Int32) -> None:
    """Set the bins before `first` to 0. The caller syncs before anyone counts."""
    select, thread, plan = s.select, s.thread, s.plan
    nothing = cute.make_rmem_tensor(VECTOR, Int32)
    nothing.fill(0)
    for i in cutlass.range_constexpr(NUM_BINS // plan.consumer_threads // VECTOR):
        vector = thread + i * plan.consumer_threads
        if VECTOR * (vector + 1) <= first:
            store4(select.histogram, vector, nothing.load())
    last = first // VECTOR * VECTOR + thread
    if thread < VECTOR and last < first:
        select.histogram[last] = Int32(0)
