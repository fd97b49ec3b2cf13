"""Items that the role gather draws from a counter, late: each in the step before the last one of
the item before it, so that nobody waits for the answer.

One thread draws a place, looks up which item has it, and stores the item's number and slots for its
role. The consumers get the number with the flags of the item's last step.

Places are in the order of the queries, so that neighbours read the same rows at the same time, but
the last lists come longest first, so that all CTAs end together. Every CTA finds this order for
itself while its first rows come.

Lists with gaps, slots that name no row, packed, so that no step multiplies what does not count.

The role gather looks at an item's first step. If it has many gaps, the ids that name a row are
counted, and if fewer steps have room for them they are written, one after the other, to the item's
rows of O, and read from there: nobody else reads or writes these before the item's end.

A list's bits depend on its ids up to the last one that names a row, not on what follows that: lists
of one step stay as they are, and so do those of which only the first step names rows.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, Uint16, cute

from flashdsa.dsl.gmem import draw, load_if, store1
from flashdsa.dsl.warp import LAST_LANE, prefix_sum
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import BF16, ROWS
from flashdsa.kernels.attention.sm90.fwd.context import Context
from flashdsa.kernels.attention.sm90.fwd.plan import DRAWN_WORDS, MOST_SORTED, THREAD_LISTS

DRAWN_FULL = 3
"""Named barrier of the role gather; 1 and 2 are the consumers'."""
COUNTS = 2
"""First counter of a sample, see `launch_sample`."""
SORTED_TURNS = 3
"""Items that are drawn longest first, as a multiple of CTAs."""
CLASSES = WARP_SIZE
"""Lists are told apart by classes of their steps."""
EXACT_STEPS, MOST_OCTAVE = 16, 7
"""Fewer steps are each a class; more share a quarter of an octave, up to this one, of 128."""
WARPS = WARPGROUP_SIZE // WARP_SIZE
ID_BYTES = 4
LEAST_GAPS = 24
"""Gaps of a list's first step, for which the list is counted."""
TURNS = 4
"""Ids that a lane loads together. Cold calls wait for code, run or not: more take longer."""


class Draws(NamedTuple):
    """The counters of a launch's draws, and its choice."""

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
    the last one. The first places are the CTAs' own, of the items with the same numbers. Each CTA
    draws until it gets none, so that draws are as many as items, and the last one leaves the
    counter at 0."""
    place = ctx.num_items
    if is_due & (ctx.thread == 0):
        place = ctx.num_ctas + draw(draws.counters.iterator, ctx.num_items)
    return place


class Order(NamedTuple):
    """Lists that are drawn longest first, `count` of them from list `first` on, the last ones. The
    region `order` has their places' lists: list first + order[i] comes at place first + i."""

    first: Int32
    count: Int32


@cute.jit
def order_of(ctx: Context) -> Order:
    """Which lists are put in order: none that has a CTA's first item."""
    own = (ctx.num_ctas + ctx.blocks - 1) // ctx.blocks
    turns = cutlass.min(SORTED_TURNS * ctx.num_ctas // ctx.blocks, Int32(MOST_SORTED))
    count = cutlass.min(turns, ctx.num_lists - own)
    return Order(ctx.num_lists - count, count)


def order_words(ctx: Context) -> Any:
    """The region `order`."""
    return ctx.memory.order.array(Uint16, MOST_SORTED)


@cute.jit
def class_of(slots: Int32, step_keys: cutlass.Constexpr) -> Int32:
    """The class of a list of so many slots, in [0, CLASSES); it does not fall with the slots."""
    steps = (slots + step_keys - 1) // step_keys
    octave = cutlass.min(Int32(31) - Int32(cute.arch.clz(steps | EXACT_STEPS)), MOST_OCTAVE)
    quarter = cutlass.min(steps >> (octave - 2), Int32(7)) - 4
    large = EXACT_STEPS + 4 * (octave - 4) + quarter
    return steps if steps < EXACT_STEPS else large


@cute.jit
def lanes_alike(number: Int32) -> Int32:
    """Mask of the lanes that have the same number in [0, CLASSES); all call."""
    alike = Int32(-1)
    for bit in cutlass.range_constexpr(CLASSES.bit_length() - 1):
        is_set = (number >> bit) & 1
        lanes = Int32(cute.arch.vote_ballot_sync(is_set == 1))
        # -1 where the bit is 0, so that its complement counts.
        alike &= lanes ^ (is_set - 1)
    return alike


def meet() -> None:
    """All threads of the role: DRAWN_FULL orders their accesses to shared memory."""
    cute.arch.barrier(barrier_id=DRAWN_FULL, number_of_threads=WARPGROUP_SIZE)


@cute.jit
def sort_lists(words: cute.Tensor, classes: list[Int32], thread: Int32) -> None:
    """Put numbers in order by their classes, the largest first, and of a class as they come; a
    warpgroup calls. `words`: (MOST_SORTED,) uint16, written: the numbers. First they count: of each
    chunk, 32 neighbouring numbers, its numbers of each class. `classes`: of the thread's numbers
    thread, thread + 128, ..."""
    warp, lane = cute.arch.make_warp_uniform(thread // WARP_SIZE), thread % WARP_SIZE
    for turn in cutlass.range_constexpr(THREAD_LISTS):
        words[turn * WARPGROUP_SIZE + thread] = Uint16(0)
    # A chunk's words are those that its own warp has cleared.
    cute.arch.sync_warp()
    ranks = []
    for turn in cutlass.range_constexpr(THREAD_LISTS):
        alike = lanes_alike(classes[turn])
        ranks.append(Int32(cute.arch.popc(alike & Int32(cute.arch.lanemask_lt()))))
        if ranks[turn] == 0:
            chunk = turn * WARPS + warp
            words[chunk * CLASSES + classes[turn]] = Uint16(cute.arch.popc(alike))
    meet()
    if warp == 0:
        # A lane has a class: its first place in each chunk takes the place of its count.
        total = Int32(0)
        for chunk in cutlass.range_constexpr(THREAD_LISTS * WARPS):
            total += Int32(words[chunk * CLASSES + lane])
        up_to = prefix_sum(total, lane)
        place = cute.arch.shuffle_sync(up_to, LAST_LANE) - up_to
        for chunk in cutlass.range_constexpr(THREAD_LISTS * WARPS):
            count = Int32(words[chunk * CLASSES + lane])
            words[chunk * CLASSES + lane] = Uint16(place)
            place += count
    meet()
    places = []
    for turn in cutlass.range_constexpr(THREAD_LISTS):
        at = (turn * WARPS + warp) * CLASSES + classes[turn]
        places.append(Int32(words[at]) + ranks[turn])
    # All have read: the places are taken.
    meet()
    for turn in cutlass.range_constexpr(THREAD_LISTS):
        words[places[turn]] = Uint16(turn * WARPGROUP_SIZE + thread)
    meet()


@cute.jit
def list_at(ctx: Context, order: Order, place: Int32) -> Int32:
    """The list at a place, after `sort_lists`."""
    number = place
    if place >= order.first:
        number = order.first + Int32(order_words(ctx)[place - order.first])
    return number


def drawn_words(ctx: Context) -> Any:
    """The items that were drawn, by turns."""
    return ctx.memory.drawn.array(Int32, 2 * DRAWN_WORDS)


@cute.jit
def publish(ctx: Context, number: Int32, drawn: Drawn) -> None:
    """Store the CTA's item of this number, which thread 0 has; all threads of the role meet.
    DRAWN_FULL: the item is stored. It lies in the place of the item two before, which everybody has
    read: they read it before they came to the meeting for the item between."""
    if ctx.thread == 0:
        words = drawn_words(ctx)
        for i in cutlass.range_constexpr(DRAWN_WORDS):
            words[(number & 1) * DRAWN_WORDS + i] = drawn[i]
    meet()


@cute.jit
def read_drawn(ctx: Context, number: Int32) -> Drawn:
    """The CTA's item of this number, which has been published."""
    words = drawn_words(ctx)
    return Drawn(*(words[(number & 1) * DRAWN_WORDS + i] for i in range(DRAWN_WORDS)))


class List(NamedTuple):
    """A list of ids."""

    line: Int64  # its address
    num_slots: Int32
    num_rows: Int32  # that exist


@cute.jit
def has_gaps(rows: list[Int32]) -> Boolean:
    """Whether a step has LEAST_GAPS; `rows`: the lane's slots of it, negative: not valid. All lanes
    call. Cold calls wait for this code, so it is short."""
    gaps = Int32(0)
    for row in rows:
        gaps += Int32(1) if row < 0 else Int32(0)
    return Boolean(Int32(cute.arch.warp_redux_sync(gaps, "add")) >= LEAST_GAPS)


@cute.jit
def rows_of_out(ctx: Context, out: cute.Tensor, item: Int32) -> tuple[Int64, Int32]:
    """(address of an item's rows of O, how many ids they have room for)."""
    query = item // ctx.blocks
    head = (item - query * ctx.blocks) * ROWS
    num_heads, d_v = Int32(out.shape[1]), out.shape[2]
    row = Int64(query) * num_heads + head
    room = cutlass.min(num_heads - head, Int32(ROWS)) * (d_v * BF16 // ID_BYTES)
    return (out.iterator + row * d_v).toint(), room


@cute.jit
def load_ids(of: List, first: Int32, end: Int32) -> list[Int32]:
    """Load the lane's ids from slot `first` to `end`, WARP_SIZE apart; negative: no row."""
    slots = [first + turn * WARP_SIZE for turn in range(TURNS)]
    named = [load_if(Int32(slot < end), of.line + slot * ID_BYTES) for slot in slots]
    ids = []
    for slot, one in zip(slots, named, strict=True):
        names_row = (slot < end) & (one < of.num_rows)
        ids.append(one if names_row else Int32(-1))
    return ids


@cute.jit
def pack(ctx: Context, of: List, to: Int64, room: Int32) -> List:
    """All four warps: pack a list. Return the packed one if it has fewer steps, else the list up to
    the last slot that names a row. `to`, `room`: address of the packed list, and the number of ids
    that it may have."""
    warp, lane = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE), ctx.thread % WARP_SIZE
    step_keys, found = ctx.plan.tile.step_keys, ctx.memory.packed.array(Int32, 2 * WARPS)
    # Each warp has neighbouring slots.
    each = (of.num_slots + WARPGROUP_SIZE - 1) // WARPGROUP_SIZE * WARP_SIZE
    first, last = warp * each, cutlass.min((warp + 1) * each, of.num_slots)
    line, num_slots, place, end, turns = of.line, Int32(0), Int32(0), Int32(0), Int32(0)
    # The first turn counts; the second one writes, if there is one.
    while turns < 2:
        for slot in cutlass.range(first, last, TURNS * WARP_SIZE, unroll=1):
            ids = load_ids(of, slot + lane, last)
            for turn in cutlass.range_constexpr(TURNS):
                valid = Int32(cute.arch.vote_ballot_sync(ids[turn] >= 0))
                if (turns == 1) & (ids[turn] >= 0):
                    before = Int32(cute.arch.popc(valid & Int32(cute.arch.lanemask_lt())))
                    store1(to + (place + before) * ID_BYTES, ids[turn])
                place += Int32(cute.arch.popc(valid))
                if valid != 0:
                    end = slot + ((turn + 1) * WARP_SIZE - Int32(cute.arch.clz(valid)))
        turns += 1
        if turns == 1:
            if lane == 0:
                found[warp], found[WARPS + warp] = place, end
            meet()
            place = Int32(0)
            for other in cutlass.range_constexpr(WARPS):
                if other < warp:
                    place += found[other]
                num_slots += found[other]
                end = cutlass.max(end, found[WARPS + other])
            steps = (num_slots + step_keys - 1) // step_keys
            line = to
            if (num_slots > room) | (steps == (end + step_keys - 1) // step_keys):
                line, num_slots, turns = of.line, end, Int32(2)
    # All ids are written, and `found` is read.
    meet()
    return List(line, num_slots, of.num_rows)
