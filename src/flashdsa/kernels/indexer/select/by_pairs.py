"""Rows of a request, two at a time: each half of the consumers, a *team*, selects in one of them.
CTAs that share a pair meet as shared_pairs.py says.

All consumers score pages, and put each score into the list of its row (score_batch.py). A team
is alone with its row between two batches of pages: its list, histogram and candidates, and a named
barrier. Lists are compacted at the same time in both teams, whichever is full, so that both list
the same pages.

A list in the order of positions has a row's part whole: keys alone, in the memory of the positions
too, as an entry's place says its position. Any other list has a segment for each warp that lists
scores, filled from its front. Nothing follows a segment's last entry, or, if the list is full or
complete, entries that never win. The row's scratch has the number of entries of each segment.
"""

from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.dsl.pipeline import PackedPhases
from flashdsa.dsl.smem import VECTOR, store4
from flashdsa.dsl.warp import prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.emit import WarpSpan, emit_by_position, emit_in_order, own_span
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile, row_length, sharers_in
from flashdsa.kernels.indexer.select.keys import Part, accepts, bin_of
from flashdsa.kernels.indexer.select.lists import (
    Listed,
    clear_histogram,
    compact,
    count_in_bin,
    key_at,
    position_at,
)
from flashdsa.kernels.indexer.select.published import (
    contribute,
    keep_contributed,
    waits_for_counts,
    write_sharers,
)
from flashdsa.kernels.indexer.select.shared_pairs import list_slots, publish_alone, raise_threshold
from flashdsa.kernels.indexer.select.threshold import Threshold, find_threshold
from flashdsa.kernels.indexer.select.tiles import (
    is_full,
    next_floor,
    nothing_listed,
    part_of,
    release_tile,
    tile_stage,
)
from flashdsa.kernels.indexer.sizes import NUM_BINS
from flashdsa.kernels.indexer.smem_views import Scratch, Selecting, consumer_sync, unpacked

READ_TOGETHER = 4
"""Entries of a lane in registers while a segment is rewritten."""


@cute.jit
def select_by_team(
    s: Selecting, source: Any, fill: cutlass.Constexpr, tile: WorkTile, phases: PackedPhases
) -> PackedPhases:
    """Select in the team's row of a tile; the last CTA of a row that is shared also among all that
    they published. See tiles.py. Both teams compact their lists after the same pages."""
    row, sharers = 2 * tile.row + s.team, sharers_in(tile.num_splits)
    length = row_length(s.output.rows, row)
    tile = tile._replace(row=row, length=length, num_splits=sharers.count)
    write_sharers(s, sharers)
    listed, selected = nothing_listed(), cutlass.Boolean(False)
    merges = cutlass.Boolean(False)  # the list is filled with published entries
    while not selected:
        nothing = Part(Int32(0), Int32(0), Int32(0), cutlass.Boolean(False))
        part, last = nothing, tile.num_pages
        if not merges:
            listed = fill(s, source, tile, tile_stage(s, phases), listed)
            part = part_of(tile, listed.entries)
            # The row may be shorter. A part that is listed whole has not been compacted.
            part = part._replace(
                end=cutlass.max(part.first, part.end),
                keys_alone=listed.floor == 0 and listed.pages == tile.num_pages,
            )
        else:
            listed = list_slots(s, listed)
            part = nothing._replace(end=tile.length, entries=listed.entries)
            last = tile.num_splits
        scored = listed.pages == last
        if scored and not merges:
            release_tile(s, phases)
        full = merges or is_full(s, s.select.scratch[Scratch.FULLEST])
        in_order = listed.floor == 0  # a compaction ends that
        if scored or full or in_order:
            here = unpacked(s)
            counts = tile.num_splits > 1 and not merges
            waits = waits_for_counts(s, tile, scored)
            in_order = scored and in_order and tile.num_splits == 1
            span = WarpSpan(Int32(0), Int32(0), Int32(0))
            if in_order:
                span = own_span(s, tile.row, part)
            if counts:
                contribute(s, listed.floor, part, waits)
            # A list that is compacted keeps at least topk entries; those of the last bin, too.
            threshold, phases = find_threshold(
                here, scored and here.coord.num_parts > 1, counts or not scored, part, phases
            )
            floor = cutlass.max(next_floor(tile, listed, threshold, s.plan), listed.floor)
            entries = listed.entries
            if counts:
                threshold, floor = raise_threshold(s, threshold, floor)
            if not scored:
                if merges:
                    entries = compact(s, entries, threshold.key, threshold.position)
                else:
                    compact_segments(s, threshold)
                listed = Listed(entries, listed.pages, floor)
                if counts:
                    keep_contributed(s)
            elif counts:
                merges = publish_alone(s, part, threshold)
                listed = nothing_listed()
                selected = not merges
            else:
                # A row that needed no scores has its ids: see `emit_unscored_rows`.
                if tile.length > s.plan.unscored_length:
                    if in_order:
                        emit_in_order(here, tile.row, part, span, threshold)
                    else:
                        emit_by_position(here, tile.row, part, threshold)
                selected = cutlass.Boolean(True)
    return phases


@cute.jit
def compact_segments(s: Selecting, threshold: Threshold) -> None:
    """Keep only the accepted entries, each segment in its order. Starts and ends synced. Unless the
    search has recounted, the histogram has all entries, and the threshold is a bin's lowest key:
    the bins that stay are right."""
    select, thread, plan = s.select, s.thread, s.plan
    if not threshold.recounted:
        clear_bins_below(s, bin_of(threshold.key))
    else:
        clear_histogram(s)
        # All consumers: the histogram is empty.
        consumer_sync(plan)
    lane = thread % WARP_SIZE
    segments = plan.lists.capacity // plan.segment_entries
    for segment in cutlass.range(thread // WARP_SIZE, segments, plan.consumer_warps, unroll=1):
        begin = segment * plan.segment_entries
        end = begin + select.scratch[Scratch.SEGMENTS + segment]
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
                    if threshold.recounted:
                        count_in_bin(select, bin_of(keys[i]))
        # All lanes have read the number of entries, also of an empty segment.
        cute.arch.sync_warp()
        if lane == 0:
            select.scratch[Scratch.SEGMENTS + segment] = kept - begin
    # All consumers: the list is as it is to be.
    consumer_sync(plan)
    spread_segments(s)


@cute.jit
def spread_segments(s: Selecting) -> None:
    """Give all segments as many entries, if the fullest one is too full to be added to. Starts and
    ends synced. A compaction leaves room in the list, but not in each segment: where the best
    tokens always have the same place in a page, a few warps list them all."""
    select, thread, plan = s.select, s.thread, s.plan
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    segments = plan.lists.capacity // plan.segment_entries
    count = Int32(0)
    if lane < segments:
        count = select.scratch[Scratch.SEGMENTS + lane]
    fullest = cute.arch.warp_redux_sync(count, "max")
    if (plan.segment_entries - fullest) * segments < plan.refill_entries:
        ends = prefix_sum(count, lane)
        total = cute.arch.shuffle_sync(ends, WARP_SIZE - 1)
        each = (total + segments - 1) // segments
        # A segment's new entries are those of a range of numbers, over all segments.
        blocks = -(-plan.most_kept // (segments * WARP_SIZE))
        taken = [
            (warp + i * plan.consumer_warps, block * WARP_SIZE + lane)
            for i in range(segments // plan.consumer_warps)
            for block in range(blocks)
        ]
        keys = cute.make_rmem_tensor(len(taken), Uint32)
        positions = cute.make_rmem_tensor(len(taken), Uint32)
        for i in cutlass.range_constexpr(len(taken)):
            segment, index = taken[i]
            number = segment * each + index
            begin, source = Int32(0), Int32(0)
            for before in cutlass.range(segments, unroll=1):
                end = cute.arch.shuffle_sync(ends, before)
                if number >= end:
                    begin, source = end, before + 1
            keys[i], positions[i] = Uint32(0), Uint32(0)
            if index < each and number < total:
                at = source * plan.segment_entries + number - begin
                keys[i], positions[i] = key_at(select, at), position_at(select, at)
        # All consumers have read their entries, over which others are written.
        consumer_sync(plan)
        for i in cutlass.range_constexpr(len(taken)):
            segment, index = taken[i]
            size = cutlass.min(cutlass.max(total - segment * each, Int32(0)), each)
            if index < size:
                at = segment * plan.segment_entries + index
                select.keys[at], select.positions[at] = Int32(keys[i]), Int32(positions[i])
            if index == 0:
                select.scratch[Scratch.SEGMENTS + segment] = size
        # All consumers: the segments are as they are to be.
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
