"""Items of a part in the order in which CTAs take them, and first rows of the keys out of order.

Items are a part's row blocks. CTA c takes those at positions c, c + num_ctas and so on of the
order. They stay as they are, so that neighbours, which may share rows of kv, run together; but
where one CTA would take longer than the others, they come longest first, every other turn
backwards. A list's rows of the slots do not depend on it, so neither do the bits.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.dsl.grids import follow_grid
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.lists import Lists
from flashdsa.kernels.attention.sm90.bwd_per_item.ordered_slots.offsets import (
    HANDED_OUT,
    LISTED,
    OUT_OF_ORDER,
    Offsets,
    Part,
    part_of,
    sums_up_to,
    unordered_of,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import CURSORS
from flashdsa.kernels.attention.sm90.bwd_per_item.tickets import (
    LENGTHS,
    begin_lengths,
    take_place,
)

THREADS = LENGTHS
"""A thread for each length that is told apart, and for each CTA."""
ITEM_TILES = 2
"""Time of an item beside its tiles, in tiles."""
MOST_UNEVEN = 1.05
"""Share of the longest CTA's time, of that of as many items of mean length, with which items stay
as they are."""


@cute.kernel
def turns_kernel(
    lists: Lists,
    offsets: Offsets,
    blocks: Int32,
    num_ctas: Int32,
    tile_keys: cutlass.Constexpr,
):
    """A part; arguments as in `launch_turns`."""
    follow_grid()
    thread, _, _ = cute.arch.thread_idx()
    number, _, _ = cute.arch.block_idx()
    allocator = cutlass.memory.SmemAllocator()
    sums = allocator.allocate_array(Int32, THREADS // WARP_SIZE)
    places, loads = (
        allocator.allocate_array(Int32, LENGTHS),
        allocator.allocate_array(Int32, LENGTHS),
    )
    part = part_of(offsets, number)
    rows = Int32(0)
    for base in cutlass.range(part.begin, part.end, THREADS, unroll=1):
        group, unordered = base + thread, Int32(0)
        if group < part.end:
            unordered = unordered_of(lists, group, lists.counts[group])
        upto, total = sums_up_to(unordered, sums, thread, THREADS)
        if group < part.end:
            offsets.unordered[group] = rows + upto - unordered
        rows += total
    if thread == 0:
        offsets.cursors[number, HANDED_OUT] = rows
        offsets.cursors[number, OUT_OF_ORDER] = rows
        for cursor in cutlass.range_constexpr(LISTED, CURSORS):
            offsets.cursors[number, cursor] = Int32(0)
    launch = blocks, num_ctas
    uneven = is_uneven(lists, part, launch, loads, sums, thread, tile_keys)
    if uneven:
        groups = part.begin, part.end
        begin_lengths(lists.counts, groups, places, sums, tile_keys, THREADS)
    for group in cutlass.range(part.begin + thread, part.end, THREADS, unroll=1):
        place = group - part.begin
        if uneven:
            place = take_place(places, lists.counts[group], tile_keys)
        write_items(offsets, part, group, place, uneven, launch)


@cute.jit
def is_uneven(
    lists: Lists,
    part: Part,
    launch: tuple[Int32, Int32],
    loads: Any,
    sums: Any,
    thread: Int32,
    tile_keys: cutlass.Constexpr,
) -> Boolean:
    """Whether one CTA would take longer than the others. All threads call, and get the same.

    Args:
        launch: row blocks of a group; CTAs. loads, sums: shared memory, a word for each CTA and
            one for each warp.
    """
    blocks, num_ctas = launch
    (loads + thread).store(Int32(0))
    cute.arch.sync_threads()
    mine = Int32(0)
    for group in cutlass.range(part.begin + thread, part.end, THREADS, unroll=1):
        tiles = (lists.counts[group] + (tile_keys - 1)) // tile_keys + ITEM_TILES
        mine += tiles * blocks
        for block in cutlass.range(blocks, unroll=1):
            at = loads + ((group - part.begin) * blocks + block) % num_ctas
            cute.arch.atomic_add(at, tiles, sem="relaxed", scope="cta")
    # The barriers inside come after every addition.
    _, total = sums_up_to(mine, sums, thread, THREADS)
    longest = cute.arch.warp_redux_sync((loads + thread).load(), "max")
    # The words of the warps may be written over when all have read them.
    cute.arch.sync_threads()
    if thread % WARP_SIZE == 0:
        (sums + thread // WARP_SIZE).store(longest)
    cute.arch.sync_threads()
    for warp in cutlass.range_constexpr(THREADS // WARP_SIZE):
        longest = cutlass.max(longest, (sums + warp).load())
    items = (part.end - part.begin) * blocks
    turns = (items + num_ctas - 1) // num_ctas
    mean = Float32(total) / Float32(cutlass.max(items, Int32(1)))
    return Boolean(Float32(longest) > Float32(MOST_UNEVEN) * Float32(turns) * mean)


@cute.jit
def write_items(
    offsets: Offsets,
    part: Part,
    group: Int32,
    place: Int32,
    uneven: Boolean,
    launch: tuple[Int32, Int32],
) -> None:
    """Write the items of a group.

    Args:
        place: of the group in its part. uneven: every other turn goes backwards, but one that not
            all CTAs have.
    """
    blocks, num_ctas = launch
    first, items = part.begin * blocks, (part.end - part.begin) * blocks
    for block in cutlass.range(blocks, unroll=1):
        position = place * blocks + block
        turn, cta = position // num_ctas, position % num_ctas
        if uneven and turn % 2 == 1 and (turn + 1) * num_ctas <= items:
            position = turn * num_ctas + (num_ctas - 1 - cta)
        offsets.order[first + position] = group * blocks + block


@cute.jit
def launch_turns(
    lists: Lists,
    offsets: Offsets,
    blocks: Int32,
    num_ctas: Int32,
    tile_keys: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`: order, unordered and cursors of all parts.

    Args:
        blocks: row blocks of a group. num_ctas: that take its items.
    """
    turns_kernel(lists, offsets, blocks, num_ctas, tile_keys).launch(
        grid=[offsets.cursors.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
    )
