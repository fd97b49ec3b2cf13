"""Work items by ticket: a CTA takes the next one when its own is nearly done.

Additions to dKV are fast where they meet rows in the second-level cache. Lists ascend, so CTAs with
equally long lists sweep over the rows of dKV together, if they begin together and none runs ahead.
Hence

- items come longest first where lengths vary, so that those that run at the same time are alike.
  Neighbours that share most of their rows stay together instead, the last TAIL items longest first;
- CTAs that sweep over more rows than the cache holds keep pace: every PACE_TILES tiles each waits
  for all others.

Role gather draws when it has copied its item's last tile, and tells all roles through a ring of
two. Earlier draws would bind short items to a CTA that has a long one.

In the other way, by slots, items are a part's row blocks. CTA c takes those at positions c, c +
num_ctas and so on of the order. They stay as they are, so that neighbours, which may share rows of
kv, run together; but where one CTA would take longer than the others, they come longest first,
every other turn backwards. A list's rows of the slots do not depend on it, so neither do the bits.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.dsl import gmem, grids, pipeline
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.lists import Lists
from flashdsa.kernels.attention.sm90.bwd_per_item import context, plan, slot_offsets

DRAWER = WARP_SIZE
"""Thread of role gather that draws; thread 0 keeps pace, and needs no order of draws by that."""
PACE_TILES = 4
"""Tiles of a CTA from one wait for the others to the next. Of 1 to 16 tiles, measured on an H100,
2 to 8 are level, 1 and 16 are 4 to 15 % slower."""
MOST_POLLS = 512
"""Polls, some 0.3 ms, after which a CTA waits no more: the others may not have begun."""
FREE = 1 << 30
"""MET from here on: nobody waits."""
TAIL = 132
"""Last items that come longest first where the others stay as they are: an H100's SMs."""
LENGTHS = 1024
"""Lengths of lists, in tiles, that are told apart; longer ones come first in any order."""
NEAR_RATIO = {0: 1.1, 2: 1.4, 4: 2.0}
"""Longest union of neighbours' lists, as a multiple of one's list, with which they stay together:
of as many neighbours, or (0) of a group of few heads. Lists of 64 heads that share 86 % were 1.2
times as fast together, 128 heads with 92 % 1.14; 128 heads with 76 % were 1.2 times as fast longest
first, 16 heads with 63 and 90 % 1.08 and 1.24."""


NONE_NEAR = -1.0
"""The same where no neighbours are counted."""


class Items(NamedTuple):
    """Facts that the order of the items depends on.

    Attributes:
        counts: keys of the items' lists, (groups,) int32.
        shared: counts, and what their queries name one by one, (groups,) int32, of groups of
            neighbours; None: no group has more than one.
        near: most keys of such a list over what its queries name, with which they are near; or
            NONE_NEAR.
        varied: topk_length is given. far: dKV has many more rows than the second-level cache.
    """

    counts: cute.Tensor
    shared: Any
    near: Float32
    varied: Boolean
    far: Boolean


@cute.jit
def order_items(
    tickets: cute.Tensor, items: Items, tile_keys: cutlass.Constexpr, threads: cutlass.Constexpr
) -> None:
    """Write the tickets of a launch; all threads of one CTA call, before it begins. `tickets`:
    (ORDER + groups,) int32, written."""
    thread, _, _ = cute.arch.thread_idx()
    allocator = cutlass.memory.SmemAllocator()
    places = allocator.allocate_array(Int32, LENGTHS)
    sums = allocator.allocate_array(Int32, threads // WARP_SIZE)
    by_length = items.varied
    if cutlass.const_expr(items.shared is not None):
        if by_length and items.near != NONE_NEAR:
            by_length = are_unlike(items, sums, thread, threads)
    if thread == 0:
        tickets[plan.SAMPLED], tickets[plan.SAMPLED + 1] = Int32(0), Int32(0)
        tickets[plan.DRAWN] = Int32(0)
        paced = items.far & (by_length | (items.varied == Boolean(False)))
        tickets[plan.MET] = Int32(0) if paced else Int32(FREE)
    if by_length:
        order_by_length(tickets, items.counts, places, sums, tile_keys, threads)
    else:
        order_tail(tickets, items.counts, threads)


@cute.jit
def are_unlike(items: Items, sums: Any, thread: Int32, threads: cutlass.Constexpr) -> Boolean:
    """Whether neighbours share little. All threads of the CTA call, and get the same."""
    counts, named = items.shared
    keys, slots = Int32(0), Int32(0)
    for group in cutlass.range(thread, Int32(counts.shape[0]), threads, unroll=4):
        keys += counts[group]
        slots += named[group]
    total = [Float32(0.0), Float32(0.0)]
    for i, own in enumerate((keys, slots)):
        # The sums before may be written over when all have read them.
        cute.arch.sync_threads()
        of_warp = cute.arch.warp_redux_sync(own, "add")
        if thread % WARP_SIZE == 0:
            (sums + thread // WARP_SIZE).store(of_warp)
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(threads // WARP_SIZE):
            total[i] += Float32((sums + warp).load())
    return Boolean(total[0] > items.near * total[1])


@cute.jit
def order_by_length(
    tickets: cute.Tensor,
    counts: cute.Tensor,
    places: Any,
    sums: Any,
    tile_keys: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:
    """Order all groups, those with most tiles first: a counting sort. `places`: LENGTHS words of
    shared memory. `sums`: a word for each warp."""
    thread, _, _ = cute.arch.thread_idx()
    groups = Int32(0), Int32(counts.shape[0])
    begin_lengths(counts, groups, places, sums, tile_keys, threads)
    for group in cutlass.range(thread, groups[1], threads, unroll=4):
        tickets[plan.ORDER + take_place(places, counts[group], tile_keys)] = group


@cute.jit
def begin_lengths(
    counts: cute.Tensor,
    groups: tuple[Int32, Int32],
    places: Any,
    sums: Any,
    tile_keys: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:
    """Write the first place of each length of lists, the longest first, to `places`. All threads of
    the CTA call. `groups`: the first one, and one past the last. The rest as in `order_by_length`.
    """
    thread, _, _ = cute.arch.thread_idx()
    own = LENGTHS // threads
    for i in cutlass.range_constexpr(own):
        (places + (own * thread + i)).store(Int32(0))
    cute.arch.sync_threads()
    for group in cutlass.range(groups[0] + thread, groups[1], threads, unroll=4):
        at = places + length_class(counts[group], tile_keys)
        cute.arch.atomic_add(at, Int32(1), sem="relaxed", scope="cta")
    cute.arch.sync_threads()
    of_class = [(places + (own * thread + i)).load() for i in range(own)]
    mine = Int32(0)
    for count in of_class:
        mine += count
    upto, _ = slot_offsets.sums_up_to(mine, sums, thread, threads)
    first = upto - mine
    for i, count in enumerate(of_class):
        (places + (own * thread + i)).store(first)
        first += count
    # All first places are there.
    cute.arch.sync_threads()


@cute.jit
def take_place(places: Any, count: Int32, tile_keys: cutlass.Constexpr) -> Int32:
    """The next place of a list of so many keys."""
    at = places + length_class(count, tile_keys)
    return cute.arch.atomic_add(at, Int32(1), sem="relaxed", scope="cta")


@cute.jit
def length_class(count: Int32, tile_keys: cutlass.Constexpr) -> Int32:
    """0 for the longest lists, and so on."""
    return LENGTHS - 1 - cutlass.min((count + (tile_keys - 1)) // tile_keys, LENGTHS - 1)


@cute.jit
def order_tail(tickets: cute.Tensor, counts: cute.Tensor, threads: cutlass.Constexpr) -> None:
    """Leave all groups as they are, but the last TAIL longest first."""
    thread, _, _ = cute.arch.thread_idx()
    end = Int32(counts.shape[0])
    first = cutlass.max(end - TAIL, Int32(0))
    for group in cutlass.range(thread, first, threads, unroll=1):
        tickets[plan.ORDER + group] = group
    for group in cutlass.range(first + thread, end, threads, unroll=1):
        count, place = counts[group], first
        for other in cutlass.range(first, end, unroll=4):
            other_count = counts[other]
            if other_count > count:
                place += 1
            if other_count == count and other < group:
                place += 1
        tickets[plan.ORDER + place] = group


@cute.jit
def item_at(ctx: context.Context, position: Int32) -> Int32:
    """The item at a position of the order; -1 after the last one."""
    item = Int32(-1)
    if position < ctx.num_items:
        group = ctx.tickets[plan.ORDER + position // ctx.row_blocks]
        item = group * ctx.row_blocks + position % ctx.row_blocks
    return item


@cute.jit
def draw_item(ctx: context.Context, number: Int32) -> None:
    """Draw the CTA's item of that number after its first, for all roles; role gather calls."""
    if ctx.thread == DRAWER:
        full, free = ctx.memory.item_full, ctx.memory.item_free
        slot = full.state(number)
        counter = ctx.tickets.iterator + plan.DRAWN
        drawn = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        item = item_at(ctx, ctx.num_ctas + drawn)
        # item_free: all roles have read the item drawn two draws before, which lay in the slot.
        pipeline.RingProducer(full, free).acquire(slot)
        (ctx.memory.items.pointer(Int32) + slot.stage).store(item)
        # item_full: what that thread stored; every thread of every role waits for it.
        full.arrive(slot.stage)


@cute.jit
def next_item(ctx: context.Context, number: Int32) -> Int32:
    """All warps of all roles: the CTA's item of that number after its first; -1: there is none."""
    ring = pipeline.RingConsumer(ctx.memory.item_full, ctx.memory.item_free)
    slot = ring.state(number)
    # item_full: the item is stored.
    ring.wait(slot)
    item = Int32(0)
    if ctx.thread % WARP_SIZE == 0:
        item = Int32((ctx.memory.items.pointer(Int32) + slot.stage).load())
        # The lane that arrives has read the item, for its warp.
        ring.release(slot.stage)
    return cute.arch.make_warp_uniform(item)


@cute.jit
def is_paced(ctx: context.Context) -> Boolean:
    """Whether the launch's CTAs keep pace."""
    return Boolean(gmem.load_relaxed(ctx.tickets.iterator + plan.MET) < FREE)


@cute.jit
def keep_pace(ctx: context.Context, number: Int32) -> None:
    """Wait, now and then, until all CTAs have come as far; one thread of role gather calls before
    each tile, which is not complete without its rows. It tells the others at every PACE_TILES-th
    tile, and waits for them a tile later. Nothing is ordered by that, and no result depends on it:
    who has waited too long frees all. `number`: of the CTA's tiles."""
    met = ctx.tickets.iterator + plan.MET
    if number % PACE_TILES == 0:
        gmem.add_relaxed(met, Int32(1))
    if number % PACE_TILES == 1:
        everybody = (number // PACE_TILES + 1) * ctx.num_ctas
        polls = Int32(0)
        while (polls < MOST_POLLS) & (gmem.load_relaxed(met) < everybody):
            polls += 1
        if polls == MOST_POLLS:
            stop_pace(ctx)


@cute.jit
def stop_pace(ctx: context.Context) -> None:
    """Let nobody wait any more; one thread calls."""
    cute.arch.atomic_max(ctx.tickets.iterator + plan.MET, Int32(FREE), sem="relaxed", scope="gpu")


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
    offsets: slot_offsets.Offsets,
    blocks: Int32,
    num_ctas: Int32,
    tile_keys: cutlass.Constexpr,
):
    """A part; arguments as in `launch_turns`."""
    grids.follow_grid()
    thread, number, _ = grids.place_in_grid()
    allocator = cutlass.memory.SmemAllocator()
    sums = allocator.allocate_array(Int32, THREADS // WARP_SIZE)
    places, loads = (
        allocator.allocate_array(Int32, LENGTHS),
        allocator.allocate_array(Int32, LENGTHS),
    )
    part = slot_offsets.part_of(offsets, number)
    rows = Int32(0)
    for base in cutlass.range(part.begin, part.end, THREADS, unroll=1):
        group, unordered = base + thread, Int32(0)
        if group < part.end:
            unordered = slot_offsets.unordered_of(lists, group, lists.counts[group])
        upto, total = slot_offsets.sums_up_to(unordered, sums, thread, THREADS)
        if group < part.end:
            offsets.unordered[group] = rows + upto - unordered
        rows += total
    if thread == 0:
        offsets.cursors[number, slot_offsets.HANDED_OUT] = rows
        offsets.cursors[number, slot_offsets.OUT_OF_ORDER] = rows
        for cursor in cutlass.range_constexpr(slot_offsets.LISTED, plan.CURSORS):
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
    part: slot_offsets.Part,
    launch: tuple[Int32, Int32],
    loads: Any,
    sums: Any,
    thread: Int32,
    tile_keys: cutlass.Constexpr,
) -> Boolean:
    """Whether one CTA would take longer than the others. All threads call, and get the same.
    `launch`: row blocks of a group; CTAs. `loads`, `sums`: shared memory, a word for each CTA and
    one for each warp."""
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
    _, total = slot_offsets.sums_up_to(mine, sums, thread, THREADS)
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
    offsets: slot_offsets.Offsets,
    part: slot_offsets.Part,
    group: Int32,
    place: Int32,
    uneven: Boolean,
    launch: tuple[Int32, Int32],
) -> None:
    """Write the items of a group. `place`: of the group in its part. `uneven`: every other turn
    goes backwards, but one that not all CTAs have."""
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
    offsets: slot_offsets.Offsets,
    blocks: Int32,
    num_ctas: Int32,
    tile_keys: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`: order, unordered and cursors of all parts. `blocks`: row blocks of a
    group. `num_ctas`: that take its items."""
    made = turns_kernel(lists, offsets, blocks, num_ctas, tile_keys)
    grids.launch_ctas(made, offsets.cursors.shape[0], THREADS, stream, use_pdl=True)
