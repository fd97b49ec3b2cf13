"""Lists of the keys that a group of neighbouring queries gives a gradient to.

Each group has a CTA. Keys that any of its queries gives a gradient to are bits in shared memory; a
key's index in the list is the number of bits before its own. Keys and each query's gradients then
go to tables in shared memory, at their indices, and on to the list. Gradients of a key that a query
names twice add up: all threads write first, and if one of them overwrites a gradient, the table is
written again, a warp for each query, in the order of its slots.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.grids import follow_grid, launch_ctas, place_in_grid
from flashdsa.dsl.smem import VECTOR, load4, store4
from flashdsa.dsl.warp import lowest_bit, neighbours_sum, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.choice import is_taken
from flashdsa.kernels.attention.union_slots import length_of
from flashdsa.kernels.indexer_training.sm90.bwd.load import Lists
from flashdsa.kernels.indexer_training.sm90.bwd.plan import LIST_THREAD_LIMIT, RANGE_KEYS, TILE_KEYS
from flashdsa.kernels.indexer_training.sm90.bwd.slots import (
    NAMED,
    PRESENT,
    RANGE_WORDS,
    REPEATED,
    Range,
    Shared,
    Slots,
    allocate_shared,
    clear,
    is_listed,
    place_of,
    read_slots,
    word_of,
)
from flashdsa.problem import INDEX_HEAD_DIM

LANE_DIMS = INDEX_HEAD_DIM // WARP_SIZE
"""Dims of a row of dK for each lane of a warp."""
SLOTS_AT_ONCE = 8
"""Slots that a lane has in flight."""


@cute.jit
def add_slots(table: cute.Pointer, place: Int32, gradient: Float32, lane: Int32) -> None:
    """Add the lanes' gradients to their entries of a query's table, in the order of the lanes.
    `place`: the entry's index; -1: the lane has none. All lanes call."""
    alike = Int32(cute.arch.match_sync(0xFFFFFFFF, place))
    left = Int32(0)
    sum_so_far = Float32(0.0)
    if place >= 0:
        left = alike
        sum_so_far = (table + place).load().bitcast(Float32)
    # Lanes of one entry have the same sum; the first of them stores it.
    while cute.arch.vote_any_sync(left != 0):
        other = cute.arch.shuffle_sync(gradient, cutlass.max(lowest_bit(left), Int32(0)))
        if left != 0:
            sum_so_far += other
        left = left & (left - 1)
    cute.arch.sync_warp()
    if place >= 0 and lowest_bit(alike) == lane:
        (table + place).store(sum_so_far.bitcast(Int32))
    cute.arch.sync_warp()


@cute.jit
def fill_table_in_order(x: Slots, shared: Shared, keys: Range, first: Int32) -> None:
    """Fill the table for queries that name a key twice: a warp for each. All threads call, and
    sync.

    The table is clear.
    """
    lane, member = x.thread % WARP_SIZE, x.thread // WARP_SIZE
    if member < x.plan.queries:
        length = length_of(x, x.first_query + member)
        line = Int64(x.first_query + member) * x.indices.shape[1]
        table = shared.table.iterator + member * x.plan.table_places
        for start in cutlass.range(0, length, SLOTS_AT_ONCE * WARP_SIZE, unroll=1):
            rows, gradients = [], []
            for i in cutlass.range_constexpr(SLOTS_AT_ONCE):
                slot = cutlass.min(start + i * WARP_SIZE + lane, length - 1)
                rows.append((x.indices.iterator + (line + slot)).load())
                gradients.append((x.gradients.iterator + (line + slot)).load())
            for i in cutlass.range_constexpr(SLOTS_AT_ONCE):
                counts = start + i * WARP_SIZE + lane < length
                place = Int32(-1)
                if is_listed(x, keys, rows[i], gradients[i].bitcast(Int32), counts):
                    place = place_of(shared, keys, rows[i]) - first
                    if place < 0 or place >= x.plan.table_places:
                        place = Int32(-1)
                add_slots(table, place, gradients[i], lane)
    cute.arch.sync_threads()


CARVEOUT = 100
"""Percent of the first-level cache that may be shared memory."""


@cute.jit
def mark_slots(
    x: Slots, shared: Shared, keys: Range, slots: Any, start: Int32, lengths: list[Int32]
) -> Int32:
    """Set the bits of the slots' keys; return the queries that give a gradient to any, a bit each.
    `slots`: of `start`, see `read_slots`. `lengths`: of the queries."""
    present = Int32(0)
    for turn in cutlass.range_constexpr(len(slots)):
        slot = start + turn * x.plan.list_threads + x.thread
        for member in cutlass.range_constexpr(x.plan.queries):
            row, gradient = slots[turn][member]
            if is_listed(x, keys, row, gradient, slot < lengths[member]):
                word, bit = word_of(keys, row)
                cute.arch.atomic_or(
                    shared.bits.iterator + word, Int32(1) << bit, sem="relaxed", scope="cta"
                )
                present = present | (1 << member)
    return present


@cute.jit
def mark_keys(
    x: Slots, shared: Shared, keys: Range, first_slots: Any, lengths: list[Int32]
) -> None:
    """Set the bits of the keys, and note the queries that give a gradient to any. All threads
    call, and sync. `first_slots`: those of start 0. `lengths`: of the queries."""
    topk, threads = Int32(x.indices.shape[1]), x.plan.list_threads
    clear(x, shared.bits, Int32(0), keys.words)
    cute.arch.sync_threads()
    present = mark_slots(x, shared, keys, first_slots, Int32(0), lengths)
    for start in cutlass.range(x.plan.own_slots * threads, topk, threads, unroll=1):
        slots = read_slots(x, Int32(start), 1)
        present = present | mark_slots(x, shared, keys, slots, Int32(start), lengths)
    for member in cutlass.range_constexpr(x.plan.queries):
        if cute.arch.vote_any_sync((present >> member) & 1 == 1):
            if x.thread % WARP_SIZE == 0:
                cute.arch.atomic_or(
                    shared.notes.iterator + PRESENT, Int32(1 << member), sem="relaxed", scope="cta"
                )
    cute.arch.sync_threads()


@cute.jit
def count_keys(x: Slots, shared: Shared, keys: Range) -> Int32:
    """Write the number of bits before each word; return the number of all bits. All call, and
    sync."""
    lane, warp = x.thread % WARP_SIZE, x.thread // WARP_SIZE
    # Words of which a thread counts the bits follow each other.
    own_vectors = RANGE_WORDS // x.plan.list_threads // VECTOR
    first = x.thread * own_vectors
    own = []
    count = Int32(0)
    for i in cutlass.range_constexpr(own_vectors):
        words = cute.make_rmem_tensor(VECTOR, Int32)
        words.fill(0)
        if (first + i) * VECTOR < keys.words:
            words.store(load4(shared.bits, first + i))
        for j in cutlass.range_constexpr(VECTOR):
            own.append(Int32(cute.arch.popc(words[j])))
            count += own[-1]
    upto = prefix_sum(count, lane)
    if lane == WARP_SIZE - 1:
        shared.counts[warp] = upto
    cute.arch.sync_threads()
    of_warp = Int32(0)
    if lane < x.plan.list_threads // WARP_SIZE:
        of_warp = shared.counts[lane]
    warps_upto = prefix_sum(of_warp, lane)
    before = cute.arch.shuffle_sync(warps_upto - of_warp, warp) + upto - count
    for i in cutlass.range_constexpr(own_vectors):
        words = cute.make_rmem_tensor(VECTOR, Int32)
        for j in cutlass.range_constexpr(VECTOR):
            words[j] = before
            before += own[VECTOR * i + j]
        store4(shared.before, first + i, words.load())
    cute.arch.sync_threads()
    return cute.arch.shuffle_sync(warps_upto, WARP_SIZE - 1)


@cute.jit
def fill_slots(
    x: Slots,
    shared: Shared,
    keys: Range,
    first: Int32,
    slots: Any,
    start: Int32,
    lengths: list[Int32],
) -> None:
    """Write the gradients of the slots whose keys have list indices from `first` on; other
    arguments as for `mark_slots`."""
    places = x.plan.table_places
    for turn in cutlass.range_constexpr(len(slots)):
        slot = start + turn * x.plan.list_threads + x.thread
        for member in cutlass.range_constexpr(x.plan.queries):
            row, gradient = slots[turn][member]
            if is_listed(x, keys, row, gradient, slot < lengths[member]):
                place = place_of(shared, keys, row) - first
                if place >= 0 and place < places:
                    at = shared.table.iterator + (member * places + place)
                    old = cute.arch.atomic_exch(at, gradient, sem="relaxed", scope="cta")
                    # It was 0, and every slot that names the key writes the same.
                    cute.arch.atomic_or(
                        shared.listed.iterator + place, row, sem="relaxed", scope="cta"
                    )
                    if old != 0:
                        cute.arch.atomic_or(
                            shared.notes.iterator + REPEATED, Int32(1), sem="relaxed", scope="cta"
                        )


@cute.jit
def fill_table(
    x: Slots, shared: Shared, keys: Range, first: Int32, first_slots: Any, lengths: list[Int32]
) -> None:
    """Write each query's gradients of the list indices from `first` on; note whether a query names
    a key twice. All threads call, and sync. Other arguments as for `mark_keys`."""
    topk, threads = Int32(x.indices.shape[1]), x.plan.list_threads
    fill_slots(x, shared, keys, first, first_slots, Int32(0), lengths)
    for start in cutlass.range(x.plan.own_slots * threads, topk, threads, unroll=1):
        slots = read_slots(x, Int32(start), 1)
        fill_slots(x, shared, keys, first, slots, Int32(start), lengths)
    cute.arch.sync_threads()


@cute.jit
def write_places(x: Slots, shared: Shared, lists: Any, group: Int32, first: Int32, end: Int32):
    """Copy keys and gradients of the table's entries up to `end` to the list from index `first`
    on; note how many gradients are not 0. All threads call. `lists`: None: they are only counted.
    """
    named = Int32(0)
    threads = x.plan.list_threads
    if cutlass.const_expr(lists is not None):
        to = lists.rows.iterator + (Int64(group) * lists.rows.shape[1] + first)
        for place in cutlass.range(x.thread, end, threads, unroll=4):
            (to + place).store(shared.listed[place])
    for member in cutlass.range_constexpr(x.plan.queries):
        if cutlass.const_expr(lists is not None):
            line = Int64(group * x.plan.queries + member) * lists.gradients.shape[1] + first
            to = lists.gradients.iterator + line
        for place in cutlass.range(x.thread, end, threads, unroll=4):
            bits = shared.table[member * x.plan.table_places + place]
            if bits << 1 != 0:
                named += 1
            if cutlass.const_expr(lists is not None):
                (to + place).store(bits.bitcast(Float32))
    named = neighbours_sum(named, WARP_SIZE)
    if x.thread % WARP_SIZE == 0:
        cute.arch.atomic_add(shared.notes.iterator + NAMED, named, sem="relaxed", scope="cta")


@cute.jit
def clear_table(x: Slots, shared: Shared, end: Int32) -> None:
    """Clear all queries' gradients of the table's entries up to `end`. All threads call, and
    sync."""
    for member in cutlass.range_constexpr(x.plan.queries):
        first = member * x.plan.table_places
        clear(x, shared.table, Int32(first), first + (end + (VECTOR - 1)) // VECTOR * VECTOR)
    cute.arch.sync_threads()


@cute.jit
def fill_tile(x: Slots, lists: Lists, group: Int32, count: Int32) -> None:
    """Fill up to a whole tile with no keys, without gradients."""
    capacity = lists.rows.shape[1]
    line = Int64(group) * capacity
    place = count + x.thread
    if place < (count + TILE_KEYS - 1) // TILE_KEYS * TILE_KEYS:
        (lists.rows.iterator + (line + place)).store(Int32(-1))
        to = lists.gradients.iterator + (line * x.plan.queries + place)
        for member in cutlass.range_constexpr(x.plan.queries):
            (to + Int64(member) * capacity).store(Float32(0.0))


@cute.jit
def list_group(x: Slots, shared: Shared, lists: Any, group: Int32) -> Int32:
    """List all ranges of keys; return the number of the group's keys. lists: None: they are only
    counted.

    All threads call, and sync.
    """
    if x.thread < 3:
        shared.notes[x.thread] = Int32(0)
    count = Int32(0)
    first_slots = read_slots(x, Int32(0), x.plan.own_slots)
    lengths = [length_of(x, x.first_query + member) for member in range(x.plan.queries)]
    for start in cutlass.range(0, x.num_keys, RANGE_KEYS, unroll=1):
        base = Int32(start)
        keys = Range(base, base + cutlass.min(x.num_keys - base, RANGE_KEYS))
        mark_keys(x, shared, keys, first_slots, lengths)
        found = count_keys(x, shared, keys)
        for place in cutlass.range(0, found, x.plan.table_places, unroll=1):
            first = Int32(place)
            end = cutlass.min(found - first, x.plan.table_places)
            clear(x, shared.listed, Int32(0), (end + (VECTOR - 1)) // VECTOR * VECTOR)
            clear_table(x, shared, end)
            fill_table(x, shared, keys, first, first_slots, lengths)
            if shared.notes[REPEATED] != 0:
                clear_table(x, shared, end)
                fill_table_in_order(x, shared, keys, first)
            write_places(x, shared, lists, group, count + first, end)
            # All have read the table, which is cleared for the next entries.
            cute.arch.sync_threads()
        count += found
        # All have read the bits, which are cleared for the next range.
        cute.arch.sync_threads()
    return count


@cute.jit
def clear_rows(dk: cute.Tensor, x: Slots) -> None:
    """Write 0 to dK, a row a warp; all threads of the grid call."""
    _, group, groups = place_in_grid()
    lane, warps = x.thread % WARP_SIZE, x.plan.list_threads // WARP_SIZE
    first = group * warps + x.thread // WARP_SIZE
    nothing = cutlass.Vector.from_elements([Float32(0.0)] * LANE_DIMS, Float32)
    for row in cutlass.range(first, dk.shape[0], groups * warps, unroll=1):
        at = dk.iterator + (Int64(row) * INDEX_HEAD_DIM + lane * LANE_DIMS)
        prims.store_ext(nothing, at.to_llvm_ptr())


@cute.kernel
def lists_kernel(
    indices: cute.Tensor, gradients: cute.Tensor, topk_length: cute.Tensor, num_keys: Int32,
    dk: cute.Tensor, clears: Int32, lists: Lists, choice: cute.Tensor, number: Int32,
    plan: cutlass.Constexpr,
):  # fmt: skip
    """One group; arguments as in `launch_lists`."""
    thread, group, _ = place_in_grid()
    follow_grid()
    shared = allocate_shared(plan)
    first = group * plan.queries
    x = Slots(indices, gradients, topk_length, num_keys, first, thread, plan)
    if is_taken(choice, number):
        if cutlass.const_expr(not plan.ordered):
            if clears != 0:
                clear_rows(dk, x)
        count = list_group(x, shared, lists, group)
        fill_tile(x, lists, group, count)
        if thread == 0:
            lists.counts[group] = count
            lists.present[group] = shared.notes[PRESENT]


@cute.kernel
def count_kernel(
    indices: cute.Tensor, gradients: cute.Tensor, topk_length: cute.Tensor, num_keys: Int32,
    counts: cute.Tensor, named: cute.Tensor, step: Int32, plan: cutlass.Constexpr,
):  # fmt: skip
    """One group of every `step`; arguments as in `launch_counts`."""
    thread, sample, _ = place_in_grid()
    follow_grid()
    shared = allocate_shared(plan)
    group = sample * step
    first = group * plan.queries
    x = Slots(indices, gradients, topk_length, num_keys, first, thread, plan)
    count = list_group(x, shared, None, group)
    if thread == 0:
        counts[sample] = count
        named[sample] = shared.notes[NAMED]


@cute.jit
def launch_lists(
    indices: cute.Tensor, gradients: cute.Tensor, topk_length: cute.Tensor, num_keys: Int32,
    dk: cute.Tensor, clears: Int32, lists: Lists, choice: cute.Tensor, number: Int32,
    plan: cutlass.Constexpr, stream: Any,
):  # fmt: skip
    """Launch on `stream`.

    Args:
        indices: (S, topk) int32. gradients: (S, topk) fp32, read where a slot is valid.
        topk_length: (S,) int32, or (0,). num_keys: S_kv, at least 1. lists: written.
        dk: (S_kv, 128) fp32, set to 0 before the backward adds to it, if clears is not 0 and the
            plan is not ordered.
        choice: lists are made if it says `number`, or is (0,).
    """
    slots = indices, gradients, topk_length, num_keys
    made = lists_kernel(*slots, dk, clears, lists, choice, number, plan)
    groups, threads = lists.counts.shape[0], plan.list_threads
    room: Any = {"sm_ctas": LIST_THREAD_LIMIT // threads, "carveout": CARVEOUT}
    launch_ctas(made, groups, threads, stream, use_pdl=True, **room)


@cute.jit
def launch_counts(
    indices: cute.Tensor, gradients: cute.Tensor, topk_length: cute.Tensor, num_keys: Int32,
    counts: cute.Tensor, named: cute.Tensor, step: Int32, plan: cutlass.Constexpr, stream: Any,
):  # fmt: skip
    """Launch on `stream`; other arguments as in `launch_lists`.

    Args:
        counts, named: (samples,) int32, written: keys of groups 0, step, ..., and gradients of all
            their queries, one by one.
    """
    made = count_kernel(indices, gradients, topk_length, num_keys, counts, named, step, plan)
    launch_ctas(made, counts.shape[0], plan.list_threads, stream, use_pdl=True)
