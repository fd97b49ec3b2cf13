"""The consumers' list of entries (key, position), its histogram, and how scores get into it.

The histogram counts the entries that may win. The others have key 0 and no position: they lie in no
range, are never accepted, and go when the list is compacted.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from flashdsa.dsl.smem import store4
from flashdsa.dsl.warp import alloc_slot, alloc_slots
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile
from flashdsa.kernels.indexer.select.sort_keys import NO_POSITION, accepts, bin_of, sortable
from flashdsa.kernels.indexer.sizes import FILLS, NUM_BINS
from flashdsa.kernels.indexer.smem_views import Scratch, SelectBuffers, Selecting, consumer_sync


def key_at(select: SelectBuffers, index: Int32) -> Uint32:
    """Key of the list's entry."""
    return Uint32(select.keys[index])


def position_at(select: SelectBuffers, index: Int32) -> Uint32:
    """Position of the list's entry."""
    return Uint32(select.positions[index])


@cute.jit
def count_in_bin(select: SelectBuffers, bin_index: Int32) -> None:
    """Add one to a bin."""
    count_at(select.histogram, bin_index)


def count_at(counts: cute.Tensor, index: Int32) -> None:
    """Add one to a count. The constant 1, unsigned, makes it the instruction that counts lanes."""
    cute.arch.inline_ptx(
        "red.relaxed.cta.shared::cta.add.u32 [{$r0}], 1;", read_only_args=[counts.iterator + index]
    )


@cute.jit
def clear_histogram(s: Selecting) -> None:
    """Set all bins to 0. The caller syncs before anyone counts."""
    select, thread, plan = s.select, s.thread, s.plan
    nothing = cute.make_rmem_tensor(4, Int32)
    nothing.fill(0)
    for i in cutlass.range_constexpr(NUM_BINS // plan.consumer_threads // 4):
        store4(select.histogram, thread + i * plan.consumer_threads, nothing.load())


@cute.jit
def append(select: SelectBuffers, key: Uint32, position: Uint32, wanted: cutlass.Boolean) -> None:
    """Put an entry at the list's end and into the histogram; all lanes call."""
    index = alloc_slot(select.scratch.iterator + Scratch.COUNT, wanted)
    if wanted:
        select.keys[index] = Int32(key)
        select.positions[index] = Int32(position)
        count_in_bin(select, bin_of(key))


@cute.jit
def append_all(
    select: SelectBuffers,
    keys: cute.Tensor,
    positions: cute.Tensor,
    wanted: cute.Tensor,
    count: cutlass.Constexpr,
) -> None:
    """Same as `append`, several entries a lane: (count,) registers each; an entry is appended where
    `wanted` is not 0."""
    slots = cute.make_rmem_tensor(count, Int32)
    alloc_slots(select.scratch.iterator + Scratch.COUNT, wanted, slots, count)
    for i in cutlass.range_constexpr(count):
        if wanted[i] != 0:
            select.keys[slots[i]] = Int32(keys[i])
            select.positions[slots[i]] = Int32(positions[i])
            count_in_bin(select, bin_of(Uint32(keys[i])))


@cute.jit
def put(
    select: SelectBuffers, index: Int32, key: Uint32, position: Int32, valid: cutlass.Boolean
) -> None:
    """Store an entry at a given index; one that is not `valid` never wins and is not counted."""
    select.keys[index] = Int32(key) if valid else Int32(0)
    select.positions[index] = position if valid else Int32(NO_POSITION)
    if valid:
        count_in_bin(select, bin_of(key))


COMPACTED_TOGETHER = 4
"""Entries of a thread in registers while a list is rewritten."""


@cute.jit
def compact(s: Selecting, count: Int32, at_key: Uint32, at_position: Uint32) -> Int32:
    """Keep only the list's accepted entries, in no special order; return their number. Ends synced.
    The list is rewritten where it is, a block at a time: a block is in registers before any of it
    is overwritten, and the kept entries never reach the next block."""
    select, thread, plan = s.select, s.thread, s.plan
    clear_histogram(s)
    if thread == 0:
        select.scratch[Scratch.COUNT] = Int32(0)
    block = COMPACTED_TOGETHER * plan.consumer_threads
    for first in cutlass.range(0, count, block, unroll=1):
        keys = cute.make_rmem_tensor(COMPACTED_TOGETHER, Uint32)
        positions = cute.make_rmem_tensor(COMPACTED_TOGETHER, Uint32)
        kept = cute.make_rmem_tensor(COMPACTED_TOGETHER, Int32)
        for i in cutlass.range_constexpr(COMPACTED_TOGETHER):
            index = first + thread + i * plan.consumer_threads
            keys[i] = Uint32(0)
            positions[i] = Uint32(0)
            kept[i] = Int32(0)
            if index < count:
                keys[i] = key_at(select, index)
                positions[i] = position_at(select, index)
                kept[i] = Int32(accepts(keys[i], positions[i], at_key, at_position))
        # All consumers: the block is in registers, so that its memory may be overwritten.
        consumer_sync(plan)
        append_all(select, keys, positions, kept, COMPACTED_TOGETHER)
    # All consumers: every kept entry is in the list, and counted.
    consumer_sync(plan)
    entries = select.scratch[Scratch.COUNT]
    consumer_sync(plan)  # everyone has read the count, so that it may be written again
    return entries


@cute.jit
def reset(s: Selecting) -> None:
    """Empty the list; synced."""
    select, thread, plan = s.select, s.thread, s.plan
    clear_histogram(s)
    if thread == 0:
        select.scratch[Scratch.COUNT] = Int32(0)
    consumer_sync(plan)


class Listed(NamedTuple):
    """The state of a tile's list."""

    entries: Int32
    pages: Int32  # of the tile that are listed
    floor: Uint32  # keys below it cannot win any more; 0: the list is not compacted yet


class PageRange(NamedTuple):
    """Pages to score: those of a tile from turn `begin` to before turn `end`."""

    tile_stage: Int32  # of the tile's queries, weights and description
    first_page: Int32  # of the tile, in the row
    num_pages: Int32  # of the tile
    first_number: Int32  # of the tile's first turn, among the CTA's
    begin: Int32
    end: Int32


class ListSink(NamedTuple):
    """Destination of scored tokens. A token's index in the list is its place among the listed pages
    until the list is first compacted, so that no thread waits for a counter; afterwards the tokens
    that can win are appended."""

    select: SelectBuffers
    first_position: Int32  # the index 0 of the list, as the caller's positions count it
    length: Int32  # tokens of the row
    floor: Uint32  # keys below it cannot win any more
    in_order: cutlass.Boolean


@cute.jit
def list_score(
    sink: ListSink,
    score: Float32,
    position: Int32,
    valid: cutlass.Boolean,
    present: cutlass.Boolean,
) -> None:
    """Put a score into the list, if it can win; all lanes call. valid: its page id is in the cache.
    present: the lane has a score."""
    key = sortable(score)
    valid = valid and position < sink.length
    if sink.in_order:
        if present:
            put(sink.select, position - sink.first_position, key, position, valid)
    else:
        wanted = present and valid and key >= sink.floor
        append(sink.select, key, Uint32(position), wanted)


@cute.jit
def first_room(
    room: Int32, in_order: cutlass.Boolean, tile: WorkTile, coord: Any, plan: cutlass.Constexpr
) -> Int32:
    """Pages that the calling CTA lists next: as many as `room` holds; before the first compaction
    of the list of a row that it has alone, the CTA's own number of pages."""
    if in_order and tile.num_pages > room and coord.num_parts == 1:
        cta, _, _ = cute.arch.block_idx()
        room = plan.lists.first_fill_pages + cta % FILLS * plan.lists.fill_step_pages
    return room
