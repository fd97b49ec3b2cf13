"""Items that the role gather draws from a counter, late: each in the step before the last one of
the item before it, so that nobody waits for the answer.

One thread draws a place, reads which item has it, and stores the item's number and slots for its
role. The consumers get the number with the flags of the item's last step.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from flashdsa.dsl.gmem import draw, load4
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.fwd.context import Context
from flashdsa.kernels.attention.sm90.fwd.plan import DRAWN_WORDS

DRAWN_FULL = 3
"""Named barrier of the role gather; 1 and 2 are the consumers'."""
COUNTS = 2
"""First counter of a sample, see `launch_sample`."""


class Draws(NamedTuple):
    """Order of the lists, which are the queries' or the groups'."""

    order: cute.Tensor  # (lists, 4) int32: number and slots; see `launch_order`
    counters: cute.Tensor  # (4,) int32, 0 before the launch and after it: draws, none, counts (2,)
    choice: cute.Tensor  # (1,) int32 says whether the launch has work, or (0,): it has


class Drawn(NamedTuple):
    """An item: its number, and slots that may be valid. The number after the last one's: none."""

    item: Int32
    slots: Int32
    main: Int32  # of them in the main list


@cute.jit
def draw_place(ctx: Context, draws: Draws, is_due: Boolean) -> Int32:
    """Thread 0 draws the next place in the order, if that is due; all others get the place after
    the last one.

    The first places are the CTAs' own, of the items with the same numbers. Each CTA draws until it
    gets none, so that draws are as many as items, and the last one leaves the counter at 0.
    """
    place = ctx.num_items
    if is_due & (ctx.thread == 0):
        place = ctx.num_ctas + draw(draws.counters.iterator, ctx.num_items)
    return place


@cute.jit
def item_at(ctx: Context, draws: Draws, place: Int32) -> Drawn:
    """The item at a place: of a list's items one has its place after the other."""
    item, slots, main = ctx.num_items, Int32(0), Int32(0)
    if place < ctx.num_items:
        number = place // ctx.blocks
        of_list, slots, main, _ = load4(draws.order.iterator + 4 * number)
        item = of_list * ctx.blocks + (place - number * ctx.blocks)
    return Drawn(item, slots, main)


def drawn_words(ctx: Context) -> Any:
    """The items that were drawn, by turns."""
    return ctx.memory.drawn.array(Int32, 2 * DRAWN_WORDS)


@cute.jit
def publish(ctx: Context, number: Int32, drawn: Drawn) -> None:
    """Store the CTA's item of this number, which thread 0 has; all threads of the role meet.

    DRAWN_FULL: the item is stored. It lies in the place of the item two before, which everybody has
    read: they read it before they came to the meeting for the item between.
    """
    if ctx.thread == 0:
        words = drawn_words(ctx)
        for i in cutlass.range_constexpr(DRAWN_WORDS):
            words[(number & 1) * DRAWN_WORDS + i] = drawn[i]
    cute.arch.barrier(barrier_id=DRAWN_FULL, number_of_threads=WARPGROUP_SIZE)


@cute.jit
def read_drawn(ctx: Context, number: Int32) -> Drawn:
    """The CTA's item of this number, which has been published."""
    words = drawn_words(ctx)
    return Drawn(*(words[(number & 1) * DRAWN_WORDS + i] for i in range(DRAWN_WORDS)))
