"""Choice between additions to dKV and rows of the slots: from samples of the lists, on the device.

An addition is slow where the second-level cache does not hold its row. Items that run at the same
time sweep over kv together, so that a row comes once for all of them that name it: as many rows
come as the lists of each wave of items have keys between them. Slots are written and read in order
instead, whatever they name.

A CTA samples a wave. It takes neighbouring keys of one of its lists, and counts what all lists of
the wave name in their range: keys by a bit each, and how often."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from flashdsa.dsl.grids import follow_grid, launch_ctas, place_in_grid
from flashdsa.dsl.smem import VECTOR, clear
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention import choice as choices
from flashdsa.kernels.attention.lists import Lists
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import ORDER, SAMPLED, WAY, saved_us
from flashdsa.kernels.attention.sm90.bwd_per_item.slot_offsets import sums_up_to

THREADS = 512
"""Two for each list of a wave, at least."""
WARPS = THREADS // WARP_SIZE
SAMPLES = 64
RANGE_KEYS = 32
"""Keys of the list that gives the range."""
WORDS = 1 << 14
"""Words of shared memory, with a bit for each row of a range; longer ones are cut."""
SPREAD, SPREAD_BITS = 40503, 16
"""Samples take lists' keys at multiples of 0.618 of their length, modulo 1."""
SPREAD_LISTS = 37


class Asked(NamedTuple):
    """Lists and their order, and what the wave is made of."""

    lists: Lists
    tickets: cute.Tensor
    num_keys: Int32
    wave: Int32  # groups that run at the same time
    blocks: Int32  # row blocks of a group


@cute.jit
def group_at(x: Asked, position: Int32) -> Int32:
    """The group at a position of the order."""
    return x.tickets[ORDER + position]


@cute.jit
def key_at(x: Asked, group: Int32, place: Int32) -> Int32:
    """A key of the group's list."""
    return (x.lists.rows.iterator + (Int64(group) * x.lists.rows.shape[1] + place)).load()


@cute.jit
def range_of(x: Asked, first: Int32, number: Int32) -> tuple[Int32, Int32]:
    """Rows of kv from the first to one past the last that a sample counts; none if its list is
    empty. `first`: position of the wave's first group. `number`: of the sample."""
    group = group_at(x, first + number * SPREAD_LISTS % x.wave)
    count = x.lists.counts[group]
    low, high = Int32(0), Int32(0)
    if count > 0:
        part = number * SPREAD % (1 << SPREAD_BITS)
        place = Int32(Int64(count) * part >> SPREAD_BITS)
        low = key_at(x, group, place)
        high = x.num_keys
        if place + RANGE_KEYS < count:
            high = key_at(x, group, place + RANGE_KEYS)
        high = cutlass.min(high, low + WORDS * choices.WORD_BITS)
    return low, high


@cute.jit
def place_of(x: Asked, group: Int32, row: Int32) -> Int32:
    """Keys of the group's list before `row`; some number of them if the list is out of order."""
    begin, end = Int32(0), x.lists.counts[group]
    while begin < end:
        middle = (begin + end) // 2
        if key_at(x, group, middle) < row:
            begin = middle + 1
        else:
            end = middle
    return begin


@cute.jit
def count_range(
    x: Asked, bits: Any, places: Any, first: Int32, low: Int32, high: Int32
) -> tuple[Int32, Int32]:
    """This thread's part of the keys that the wave's lists have between the rows, and of how often
    they have them. `places`: shared memory, the first place of each list in the range and one past
    the last."""
    thread, _, _ = cute.arch.thread_idx()
    rows, named = Int32(0), Int32(0)
    for member in cutlass.range(thread // WARP_SIZE, x.wave, WARPS, unroll=1):
        group = group_at(x, first + member)
        begin, end = (places + 2 * member).load(), (places + (2 * member + 1)).load()
        for place in cutlass.range(begin + thread % WARP_SIZE, end, WARP_SIZE, unroll=2):
            key = key_at(x, group, place)
            if key >= low and key < high:
                named += 1
                bit = Int32(1) << ((key - low) % choices.WORD_BITS)
                word = bits + (key - low) // choices.WORD_BITS
                if (cute.arch.atomic_or(word, bit, sem="relaxed", scope="cta") & bit) == 0:
                    rows += 1
    return rows, named


@cute.kernel
def slots_choice_kernel(asked: Asked, choice: Any):
    """One sample; arguments as in `launch_slots_choice`."""
    thread, number, samples = place_in_grid()
    allocator = SmemAllocator()
    bits = allocator.allocate_array(Int32, WORDS)
    places = allocator.allocate_array(Int32, THREADS)
    sums = allocator.allocate_array(Int32, WARPS)
    last = allocator.allocate_array(Int32, 1)
    words = cute.make_tensor(bits, cute.make_layout(WORDS))
    clear(words, thread, Int32(WORDS // VECTOR), THREADS)
    follow_grid()
    if choices.is_taken(choice, Int32(choices.SECOND)):
        groups = Int32(asked.lists.counts.shape[0])
        x = asked._replace(wave=cutlass.min(asked.wave, groups))
        first = Int32(Int64(number) * (groups - x.wave) // (samples - 1))
        low, high = range_of(x, first, number)
        if thread < 2 * x.wave:
            group = group_at(x, first + thread // 2)
            row = low if thread % 2 == 0 else high
            (places + thread).store(place_of(x, group, row))
        # The places are there, and no bit is set.
        cute.arch.sync_threads()
        own_rows, own_named = count_range(x, bits, places, first, low, high)
        _, rows = sums_up_to(own_rows, sums, thread, THREADS)
        _, named = sums_up_to(own_named, sums, thread, THREADS)
        if thread == 0:
            both = choices.add_counts(x.tickets.iterator + SAMPLED, rows, named)
            (places + 0).store(Int32(both & ((1 << choices.COUNT_BITS) - 1)))
            (places + 1).store(
                Int32((both >> choices.COUNT_BITS) & ((1 << choices.COUNT_BITS) - 1))
            )
            last.store(Int32(both >> (2 * choices.COUNT_BITS) == samples))
        cute.arch.sync_threads()
        if last.load() != 0:
            keys = Int32(0)
            for group in cutlass.range(thread, groups, THREADS, unroll=4):
                keys += x.lists.counts[group]
            _, every = sums_up_to(keys, sums, thread, THREADS)
            if thread == 0:
                found = Float32((places + 0).load()), Float32((places + 1).load())
                choose(x, found, Float32(every))


@cute.jit
def choose(x: Asked, found: tuple[Float32, Float32], keys: Float32) -> None:
    """Write the choice; one thread calls. `found`: keys that samples of waves have, and how often
    their lists have them. `keys`: of all lists."""
    share = found[0] / cutlass.max(found[1], Float32(1.0))
    rows = share * keys
    of_sums = cutlass.min(rows, Float32(x.num_keys))
    saved = saved_us(keys * Float32(x.blocks), rows, of_sums)
    x.tickets[WAY] = Int32(choices.SECOND) if saved > 0 else Int32(choices.FIRST)


@cute.jit
def launch_slots_choice(
    lists: Lists,
    tickets: cute.Tensor,
    num_keys: Int32,
    wave: Int32,
    blocks: Int32,
    choice: Any,
    stream: Any,
):
    """Launch on `stream`, behind the lists and their order. `tickets`: of the launch; `WAY` is
    written: SECOND, slots, if they save time. `num_keys`: S_kv. `wave`: groups that run at the same
    time. `blocks`: row blocks of a group. `choice`: nothing is done if it does not say SECOND, see
    `choice.py`; None: it does."""
    asked = Asked(lists, tickets, num_keys, cutlass.min(wave, Int32(THREADS // 2)), blocks)
    launch_ctas(slots_choice_kernel(asked, choice), SAMPLES, THREADS, stream, use_pdl=True)
