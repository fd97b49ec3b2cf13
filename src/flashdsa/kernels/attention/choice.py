"""Choice between two groupings of a launch: from its lists, on the device.

Both groupings are launched, and the kernels of the one that is not taken have no work. The first is
taken if its queries have so much in common that its lists are short: `ratio` times what their
queries name, divided by the queries of a group, at most. A sample of the groups can say before they
are made that they will not be.

A group is sampled by a CTA, which counts the rows that its queries name together by a bit for each
row of kv in shared memory. If kv has more rows than bits, blocks of neighbouring rows are left out,
evenly. The counts of all groups are added in one 64-bit number with the CTAs that have counted, so
that one addition tells the last CTA all, and nothing needs an order.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from flashdsa.dsl import ptx
from flashdsa.dsl.grids import follow_grid, launch_ctas, place_in_grid
from flashdsa.dsl.smem import VECTOR, clear
from flashdsa.dsl.warp import neighbours_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.lists import SAMPLED_CHOICE, SAMPLED_ROWS, SAMPLED_SLOTS
from flashdsa.kernels.attention.union_slots import length_of

CHOICE_THREADS = 1024
SAMPLE_THREADS = 512
SAMPLE_WARPS = SAMPLE_THREADS // WARP_SIZE
SAMPLES = 64
"""Groups of a sample."""
WORD_BITS = 32
WORDS = 1 << 14
"""Words of shared memory, with a bit a row."""
BLOCK = 64
"""Neighbouring rows that are counted, or left out, together."""
LOADED_TOGETHER = 4
"""Slots of a query that a thread asks for before it uses the first."""
COUNT_BITS = 28
"""Bits of each of the two counts: of 64 groups, of 2^22 slots each."""
FIRST, SECOND = 0, 1


@cute.jit
def is_taken(choice: Any, number: Int32) -> Boolean:
    """Whether a grouping has work. `choice`: (1,) int32, FIRST or SECOND; None, or (0,): only one
    grouping. `number`: the grouping's, FIRST or SECOND."""
    taken = Boolean(True)
    if cutlass.const_expr(choice is not None):
        if choice.shape[0] > 0:
            taken = choice[0] == number
    return taken


@cute.kernel
def choice_kernel(
    counts: cute.Tensor,
    named: cute.Tensor,
    choice: cute.Tensor,
    ratio: Float32,
    queries: cutlass.Constexpr,
    most_keys: Any,
    sampled: Any,
    tile_keys: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_choice`."""
    follow_grid()
    thread, _, _ = cute.arch.thread_idx()
    judged = cutlass.const_expr(most_keys is not None)
    number = 3 if judged else 2
    sums = cutlass.memory.SmemAllocator().allocate_array(
        Float32, number * CHOICE_THREADS // WARP_SIZE
    )
    keys, slots, too_long = Float32(0), Float32(0), Float32(0)
    groups, made = Int32(counts.shape[0]), Boolean(True)
    if cutlass.const_expr(sampled is not None):
        made = is_taken(sampled, Int32(FIRST))
        groups = groups if made else Int32(0)
    for group in cutlass.range(thread, groups, CHOICE_THREADS, unroll=4):
        of_group, of_queries = counts[group], named[group]
        if cutlass.const_expr(tile_keys > 1):
            of_group = (of_group + (tile_keys - 1)) // tile_keys
            of_tiles = queries * tile_keys
            of_queries = (of_queries + (of_tiles - 1)) // of_tiles * queries
        keys += Float32(of_group)
        slots += Float32(of_queries)
        if cutlass.const_expr(most_keys is not None):
            too_long += Float32(1.0) if counts[group] > most_keys else Float32(0.0)
    for i, own in enumerate((keys, slots, too_long)[:number]):
        total = neighbours_sum(own, WARP_SIZE)
        if thread % WARP_SIZE == 0:
            (sums + (thread // WARP_SIZE * number + i)).store(total)
    cute.arch.sync_threads()
    if thread < WARP_SIZE:
        totals = [
            neighbours_sum((sums + (number * thread + i)).load(), WARP_SIZE) for i in range(number)
        ]
        if thread == 0:
            taken = totals[0] * queries <= ratio * totals[1]
            if cutlass.const_expr(judged):
                taken = taken and totals[2] == Float32(0.0)
            choice[0] = Int32(FIRST) if made and taken else Int32(SECOND)


@cute.jit
def launch_choice(
    counts: cute.Tensor,
    named: cute.Tensor,
    choice: cute.Tensor,
    ratio: Float32,
    queries: cutlass.Constexpr,
    stream: Any,
    most_keys: Any = None,
    sampled: Any = None,
    tile_keys: cutlass.Constexpr = 1,
):
    """Launch on `stream`.

    Args:
        counts, named: of the first grouping's lists, (groups,) int32: keys, and what the queries of
            a group name, one by one. choice: (1,) int32, written.
        ratio: of a list's length to that of one query's, up to which the first grouping is taken.
        queries: of a group of the first grouping.
        most_keys: of a list: it is not taken if one has more; None: then too.
        sampled: a choice; the lists are made if it is FIRST. None: they are made.
        tile_keys: lists are compared in whole tiles of so many keys, those of a group's queries as
            if they were equally long.
    """
    made = choice_kernel(counts, named, choice, ratio, queries, most_keys, sampled, tile_keys)
    launch_ctas(made, 1, CHOICE_THREADS, stream, use_pdl=True)


MOST_TIME = 0.82
"""Estimated time of groups, of that of queries one by one, up to which they are taken."""
LISTS_US = 4.0
"""Time of making the groups' lists beside their bits."""
MADE_UP = 0.5
"""Part of a step that an item's last step does not fill, on average."""


class Times(NamedTuple):
    """Estimated microseconds of a launch's items, by which groups are taken or not."""

    item_us: Float32  # of an item beside its steps
    step_us: Float32  # of a step
    step_slots: Float32  # slots of a step
    union_us: Float32  # of making a group's list
    num_sms: Int32  # that share the items


class Asked(NamedTuple):
    """Slots of all queries, and what to choose by."""

    indices: cute.Tensor  # (S, topk) int32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    num_keys: Int32
    ratio: Float32  # see `choice.py`


@cute.jit
def named_row(x: Asked, query: Int32, slot: Int32, length: Int32) -> Int32:
    """The row that a slot of the query names; -1 beyond the list's end."""
    row = Int32(-1)
    if slot < length:
        row = (x.indices.iterator + (Int64(query) * x.indices.shape[1] + slot)).load()
    return row


def counted_every(x: Asked) -> Any:
    """Blocks of rows of which one is counted."""
    return (x.num_keys + WORDS * WORD_BITS - 1) // (WORDS * WORD_BITS)


@cute.jit
def count_rows(
    x: Asked, bits: cute.Tensor, first_query: Int32, group: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """This thread's part of the rows that the group names, and of the slots that name them."""
    thread, _, _ = cute.arch.thread_idx()
    rows, slots = Int32(0), Int32(0)
    every = counted_every(x)
    lengths = [length_of(x, first_query + member) for member in range(group)]
    topk = Int32(x.indices.shape[1])
    for first in cutlass.range(thread, topk, LOADED_TOGETHER * SAMPLE_THREADS, unroll=1):
        asked = [first + i * SAMPLE_THREADS for i in range(LOADED_TOGETHER)]
        # All loads are under way before the first one is waited for.
        named = [
            [named_row(x, first_query + member, slot, lengths[member]) for slot in asked]
            for member in range(group)
        ]
        for member in cutlass.range_constexpr(group):
            for i in cutlass.range_constexpr(LOADED_TOGETHER):
                row = named[member][i]
                block = row // BLOCK
                if row >= 0 and row < x.num_keys and block % every == 0:
                    slots += 1
                    place = block // every * BLOCK + row % BLOCK
                    bit = Int32(1) << (place % WORD_BITS)
                    word = bits.iterator + place // WORD_BITS
                    old = cute.arch.atomic_or(word, bit, sem="relaxed", scope="cta")
                    if (old & bit) == 0:
                        rows += 1
    return rows, slots


@cute.jit
def add_counts(counts: Any, rows: Int32, slots: Int32) -> Int64:
    """Add a CTA's counts; the sums with them."""
    own = Int64(rows) + (Int64(slots) << COUNT_BITS) + (Int64(1) << (2 * COUNT_BITS))
    before = cute.arch.inline_ptx(
        "atom.relaxed.gpu.global.add.u64 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int64],
        read_only_args=[counts, own],
    )
    return before + own


def time_of_items(times: Times, items: Int32, slots: Float32, list_us: Float32) -> Any:
    """Microseconds of items of so many slots, which all SMs share; `list_us`: of an item's list."""
    steps = slots / times.step_slots + Float32(MADE_UP)
    turns = cutlass.max(Float32(items) / Float32(times.num_sms), Float32(1.0))
    return turns * (times.item_us + times.step_us * steps + list_us)


@cute.jit
def takes_less(
    x: Asked,
    found: tuple[Float32, Float32],
    groups: Int32,
    samples: Int32,
    group: cutlass.Constexpr,
    times: Times,
) -> Boolean:
    """Whether groups take less time than queries one by one, as far as a sample of them says: they
    may be too few for all SMs, and lists too short to repay the union. `found`: rows that the
    sampled groups name, and slots that name them."""
    of_group = Float32(counted_every(x)) / Float32(samples)
    named = found[1] * of_group * Float32(1 / group)
    alone = time_of_items(times, Int32(x.indices.shape[0]), named, Float32(0.0))
    together = time_of_items(times, groups, found[0] * of_group, times.union_us)
    return Boolean(together + Float32(LISTS_US) < Float32(MOST_TIME) * alone)


@cute.kernel
def sample_kernel(
    x: Asked,
    counts: Any,
    choice: cute.Tensor,
    group: cutlass.Constexpr,
    keeps: cutlass.Constexpr = False,
    times: Any = None,
):
    """One group; arguments as in `launch_sample`."""
    thread, number, samples = place_in_grid()
    allocator = SmemAllocator()
    pointer = allocator.allocate_array(Int32, WORDS)
    bits = cute.make_tensor(pointer, cute.make_layout(WORDS))
    sums = cute.make_tensor(
        allocator.allocate_array(Int32, 2 * SAMPLE_WARPS),
        cute.make_layout((SAMPLE_WARPS, 2), stride=(2, 1)),
    )
    used = cutlass.min((x.num_keys + WORD_BITS - 1) // WORD_BITS, Int32(WORDS))
    clear(bits, thread, (used + VECTOR - 1) // VECTOR, SAMPLE_THREADS)
    cute.arch.sync_threads()
    follow_grid()
    groups = (x.indices.shape[0] + group - 1) // group
    first_query = Int32(Int64(number) * groups // samples) * group
    for i, own in enumerate(count_rows(x, bits, first_query, group)):
        total = neighbours_sum(own, WARP_SIZE)
        if thread % WARP_SIZE == 0:
            sums[thread // WARP_SIZE, i] = total
    cute.arch.sync_threads()
    if thread == 0:
        rows, slots = Int32(0), Int32(0)
        for warp in cutlass.range_constexpr(SAMPLE_WARPS):
            rows += sums[warp, 0]
            slots += sums[warp, 1]
        both = add_counts(counts, rows, slots)
        if both >> (2 * COUNT_BITS) == samples:
            mask = Int64((1 << COUNT_BITS) - 1)
            keys, named = both & mask, (both >> COUNT_BITS) & mask
            is_first = Float32(keys) * group <= x.ratio * Float32(named)
            if cutlass.const_expr(times is not None):
                found = Float32(keys), Float32(named)
                is_first = is_first and takes_less(x, found, groups, samples, group, times)
            choice[SAMPLED_CHOICE] = Int32(FIRST) if is_first else Int32(SECOND)
            if cutlass.const_expr(keeps):
                choice[SAMPLED_ROWS], choice[SAMPLED_SLOTS] = Int32(keys), Int32(named)
            # Every CTA has added: the last one leaves 0 for the next launch.
            ptx.run("st.relaxed.gpu.global.u64 [{$r0}], {$r1};", counts, Int64(0))


@cute.jit
def launch_sample(
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    num_keys: Int32,
    counts: Any,
    choice: cute.Tensor,
    ratio: Float32,
    group: cutlass.Constexpr,
    stream: Any,
    keeps: cutlass.Constexpr = False,
    times: Any = None,
):
    """Launch on `stream`.

    Args:
        indices: (S, topk) int32. topk_length: (S,) int32, or (0,). num_keys: S_kv, at least 1.
        counts: pointer to 8 bytes of device memory, 0 before the launch and after it.
        choice: (1,) int32, written: FIRST, the groups, or SECOND; see `choice.py`. If kept, the
            words of `SAMPLED_CHOICE` and the like.
        ratio: of a union's length to that of one query's list, up to which groups are taken.
        group: queries of a group. keeps: the sample is kept.
        times: `Times`, by which groups must take less time, too; None: they need not.
    """
    groups = (indices.shape[0] + group - 1) // group
    x = Asked(indices, topk_length, num_keys, ratio)
    made = sample_kernel(x, counts, choice, group, keeps, times)
    launch_ctas(made, cutlass.min(groups, Int32(SAMPLES)), SAMPLE_THREADS, stream, use_pdl=True)
