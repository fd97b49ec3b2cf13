"""Work items by ticket: a CTA takes the next one when its own is nearly done.

Items come in their order, so that those of neighbouring queries run at the same time and share rows
of kv and dKV in the second-level cache; only the last `num_ctas` come longest first. Role high
draws, two tiles before its item ends, and tells all roles through a ring of two.
"""

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.pipeline import RingConsumer, RingProducer
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.bwd_per_item.context import Context

TILES_AHEAD = 2
"""Tiles of an item that are left when the next one is drawn: role gather goes on without a wait.
Earlier draws would bind short items to a CTA that has a long one."""


@cute.jit
def order_tail(tickets: cute.Tensor, counts: cute.Tensor, threads: cutlass.Constexpr) -> None:
    """Write the tickets of a launch; all threads of one CTA call, before it begins.

    Args:
        tickets: (1 + num_ctas,) int32, written. counts: keys of the items' lists.
    """
    thread, _, _ = cute.arch.thread_idx()
    end = Int32(counts.shape[0])
    first = cutlass.max(end - (Int32(tickets.shape[0]) - 1), Int32(0))
    if thread == 0:
        tickets[0] = Int32(0)
    for item in cutlass.range(first + thread, end, threads, unroll=1):
        count, place = counts[item], Int32(0)
        for other in cutlass.range(first, end, unroll=4):
            other_count = counts[other]
            if other_count > count:
                place += 1
            if other_count == count and other < item:
                place += 1
        tickets[1 + place] = item


@cute.jit
def item_at(ctx: Context, position: Int32) -> Int32:
    """The item at a position of the launch, which are numbered alike; -1 after the last one."""
    item = position
    tail = cutlass.max(ctx.num_items - ctx.num_ctas, Int32(0))
    if position >= ctx.num_items:
        item = Int32(-1)
    elif position >= tail:
        item = ctx.tickets[1 + position - tail]
    return item


@cute.jit
def draw_item(ctx: Context, number: Int32) -> None:
    """Draw the CTA's item of that number after its first, for all roles; role high calls."""
    if ctx.thread == 0:
        full, free = ctx.memory.item_full, ctx.memory.item_free
        slot = full.state(number)
        drawn = cute.arch.atomic_add(ctx.tickets.iterator, Int32(1), sem="relaxed", scope="gpu")
        item = item_at(ctx, ctx.num_ctas + drawn)
        # item_free: all roles have read the item drawn two draws before, which lay in the slot.
        RingProducer(full, free).acquire(slot)
        (ctx.memory.items.pointer(Int32) + slot.stage).store(item)
        # item_full: what thread 0 of role high stored; every thread of every role waits for it.
        full.arrive(slot.stage)


@cute.jit
def next_item(ctx: Context, number: Int32) -> Int32:
    """The CTA's item of that number after its first, -1 if there is none. All warps of all roles
    call."""
    ring = RingConsumer(ctx.memory.item_full, ctx.memory.item_free)
    slot = ring.state(number)
    # item_full: the item is stored.
    ring.wait(slot)
    item = Int32(0)
    if ctx.thread % WARP_SIZE == 0:
        item = Int32((ctx.memory.items.pointer(Int32) + slot.stage).load())
        # The lane that arrives has read the item, for its warp.
        ring.release(slot.stage)
    return cute.arch.make_warp_uniform(item)
