"""Lists of the keys that a group of neighbouring queries gives a gradient to.

A CTA a group. Of a range of keys each query's gradients are a table in shared memory; keys of which
any is not 0 come out in ascending order, with the gradients of all queries of the group. What a
query names twice adds up: first all threads write, and if one of them finds a gradient there, the
range is written again, a thread for each query, in the order of its slots.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from flashdsa.dsl.smem import VECTOR, store4
from flashdsa.dsl.warp import neighbours_sum, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer_training.sm90.bwd.context import Lists
from flashdsa.kernels.indexer_training.sm90.bwd.plan import TILE_KEYS, BwdPlan
from flashdsa.kernels.sparse_mla.sm90.choice import is_taken

THREADS = 1024
WARPS = THREADS // WARP_SIZE


class Slots(NamedTuple):
    """What the group's queries name."""

    indices: cute.Tensor  # (S, topk) int32
    gradients: cute.Tensor  # (S, topk) fp32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    num_keys: Int32
    first_query: Int32
    thread: Int32
    plan: cutlass.Constexpr


class Shared(NamedTuple):
    """Shared memory."""

    table: cute.Tensor  # (queries * table_keys,) bits of fp32
    counts: cute.Tensor  # (WARPS,) int32: keys that each warp found
    notes: cute.Tensor  # (3,) int32: queries that name a key; whether any repeats; gradients


PRESENT, REPEATED, NAMED = range(3)


def allocate_shared(plan: BwdPlan) -> Shared:
    """The kernel's shared memory."""
    allocator = SmemAllocator()

    def words(count: int) -> Any:
        pointer = allocator.allocate_array(Int32, count)
        return cute.make_tensor(pointer, cute.make_layout(count))

    return Shared(words(plan.queries * plan.table_keys), words(WARPS), words(3))


@cute.jit
def length_of(x: Slots, query: Int32) -> Int32:
    """Slots of the query that may be valid; 0 behind the last query."""
    count = Int32(0)
    if query < x.indices.shape[0]:
        count = Int32(x.indices.shape[1])
        if x.topk_length.shape[0] > 0:
            count = cutlass.min(cutlass.max(x.topk_length[query], Int32(0)), count)
    return count


@cute.jit
def clear_table(x: Slots, shared: Shared) -> None:
    """No query has a gradient. All threads call, and sync."""
    nothing = cute.make_rmem_tensor(VECTOR, Int32)
    nothing.fill(0)
    words = x.plan.queries * x.plan.table_keys
    for at in cutlass.range(x.thread, words // VECTOR, THREADS, unroll=4):
        store4(shared.table, at, nothing.load())
    cute.arch.sync_threads()


@cute.jit
def place_of(x: Slots, row: Int32, base: Int32, counts: Boolean) -> Int32:
    """Of a key in the table's range that begins at `base`; -1 of one that is not there."""
    place = row - base
    if not counts or row < 0 or row >= x.num_keys or place < 0 or place >= x.plan.table_keys:
        place = Int32(-1)
    return place


@cute.jit
def mark(x: Slots, shared: Shared, base: Int32) -> None:
    """The gradients of the keys from `base` on. All threads call, and sync."""
    for slot in cutlass.range(x.thread, Int32(x.indices.shape[1]), THREADS, unroll=1):
        rows, gradients = [], []
        for member in cutlass.range_constexpr(x.plan.queries):
            query = cutlass.min(x.first_query + member, Int32(x.indices.shape[0]) - 1)
            line = Int64(query) * x.indices.shape[1] + slot
            rows.append((x.indices.iterator + line).load())
            gradients.append((x.gradients.iterator + line).load().bitcast(Int32))
        for member in cutlass.range_constexpr(x.plan.queries):
            counts = slot < length_of(x, x.first_query + member) and gradients[member] << 1 != 0
            place = place_of(x, rows[member], base, counts)
            if place >= 0:
                at = shared.table.iterator + (member * x.plan.table_keys + place)
                old = cute.arch.atomic_exch(at, gradients[member], sem="relaxed", scope="cta")
                if old != 0:
                    cute.arch.atomic_or(
                        shared.notes.iterator + REPEATED, Int32(1), sem="relaxed", scope="cta"
                    )
    cute.arch.sync_threads()


@cute.jit
def mark_in_order(x: Slots, shared: Shared, base: Int32) -> None:
    """The same, of queries that name a key twice: a thread for each. All threads call, and sync."""
    clear_table(x, shared)
    if x.thread < x.plan.queries:
        length = length_of(x, x.first_query + x.thread)
        line = Int64(x.first_query + x.thread) * x.indices.shape[1]
        table = shared.table.iterator + x.thread * x.plan.table_keys
        for slot in cutlass.range(length, unroll=4):
            row = (x.indices.iterator + (line + slot)).load()
            gradient = (x.gradients.iterator + (line + slot)).load()
            place = place_of(x, row, base, Boolean(True))
            if place >= 0:
                sum_so_far = (table + place).load().bitcast(Float32)
                (table + place).store((sum_so_far + gradient).bitcast(Int32))
    cute.arch.sync_threads()


@cute.jit
def find_keys(x: Slots, shared: Shared) -> list[Int32]:
    """A mask for each 32 of the warp's part of the table: keys with a gradient.

    Notes how many each warp has, and the queries that have any. All threads call, and sync.
    """
    lane, warp = x.thread % WARP_SIZE, x.thread // WARP_SIZE
    part = x.plan.table_keys // WARPS
    masks = []
    present, named, count = Int32(0), Int32(0), Int32(0)
    for step in cutlass.range_constexpr(part // WARP_SIZE):
        some = Boolean(False)
        for member in cutlass.range_constexpr(x.plan.queries):
            at = member * x.plan.table_keys + warp * part + step * WARP_SIZE + lane
            if shared.table[at] << 1 != 0:
                some = Boolean(True)
                present = present | (1 << member)
                named += 1
        mask = Int32(cute.arch.vote_ballot_sync(some))
        masks.append(mask)
        count += Int32(cute.arch.popc(mask))
    if present != 0:
        cute.arch.atomic_or(shared.notes.iterator + PRESENT, present, sem="relaxed", scope="cta")
    named = neighbours_sum(named, WARP_SIZE)
    if lane == 0:
        shared.counts[warp] = count
        cute.arch.atomic_add(shared.notes.iterator + NAMED, named, sem="relaxed", scope="cta")
    cute.arch.sync_threads()
    return masks


@cute.jit
def write_keys(
    x: Slots, shared: Shared, lists: Lists, group: Int32, place: Int32, base: Int32, masks: Any
) -> None:
    """The warp's keys to the list's places from `place` on."""
    lane, warp = x.thread % WARP_SIZE, x.thread // WARP_SIZE
    part = x.plan.table_keys // WARPS
    capacity = lists.rows.shape[1]
    line = Int64(group) * capacity
    for step in cutlass.range_constexpr(part // WARP_SIZE):
        mask = masks[step]
        if (mask >> lane) & 1 == 1:
            own = place + Int32(cute.arch.popc(mask & Int32(cute.arch.lanemask_lt())))
            key = warp * part + step * WARP_SIZE + lane
            (lists.rows.iterator + (line + own)).store(base + key)
            to = lists.gradients.iterator + (line * x.plan.queries + own)
            for member in cutlass.range_constexpr(x.plan.queries):
                bits = shared.table[member * x.plan.table_keys + key]
                (to + Int64(member) * capacity).store(bits.bitcast(Float32))
        place += Int32(cute.arch.popc(mask))


@cute.jit
def fill_tile(x: Slots, lists: Lists, group: Int32, count: Int32) -> None:
    """No keys up to a whole tile, without gradients."""
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
    """All ranges; returns how many keys the group has. lists: None: they are only counted."""
    lane, warp = x.thread % WARP_SIZE, x.thread // WARP_SIZE
    if x.thread < 3:
        shared.notes[x.thread] = Int32(0)
    count = Int32(0)
    for start in cutlass.range(0, x.num_keys, x.plan.table_keys, unroll=1):
        base = Int32(start)
        clear_table(x, shared)
        mark(x, shared, base)
        if shared.notes[REPEATED] != 0:
            mark_in_order(x, shared, base)
        masks = find_keys(x, shared)
        upto = prefix_sum(shared.counts[lane], lane)
        before = cute.arch.shuffle_sync(upto, cutlass.max(warp - 1, Int32(0)))
        if warp == 0:
            before = Int32(0)
        if cutlass.const_expr(lists is not None):
            write_keys(x, shared, lists, group, count + before, base, masks)
        count += cute.arch.shuffle_sync(upto, WARP_SIZE - 1)
        # All have read the table and the counts, which the next range overwrites.
        cute.arch.sync_threads()
    return count


@cute.kernel
def lists_kernel(
    indices: cute.Tensor,
    gradients: cute.Tensor,
    topk_length: cute.Tensor,
    num_keys: Int32,
    lists: Lists,
    choice: cute.Tensor,
    number: Int32,
    plan: cutlass.Constexpr,
):
    """One group; arguments as in `launch_lists`."""
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    shared = allocate_shared(plan)
    first = group * plan.queries
    x = Slots(indices, gradients, topk_length, num_keys, first, thread, plan)
    if is_taken(choice, number):
        count = list_group(x, shared, lists, group)
        fill_tile(x, lists, group, count)
        if thread == 0:
            lists.counts[group] = count
            lists.present[group] = shared.notes[PRESENT]


@cute.kernel
def count_kernel(
    indices: cute.Tensor,
    gradients: cute.Tensor,
    topk_length: cute.Tensor,
    num_keys: Int32,
    counts: cute.Tensor,
    named: cute.Tensor,
    step: Int32,
    plan: cutlass.Constexpr,
):
    """One group of every `step`; arguments as in `launch_counts`."""
    thread, _, _ = cute.arch.thread_idx()
    sample, _, _ = cute.arch.block_idx()
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
    indices: cute.Tensor,
    gradients: cute.Tensor,
    topk_length: cute.Tensor,
    num_keys: Int32,
    lists: Lists,
    choice: cute.Tensor,
    number: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`.

    Args:
        indices: (S, topk) int32. gradients: (S, topk) fp32, read where a slot is valid.
        topk_length: (S,) int32, or (0,). num_keys: S_kv, at least 1. lists: written.
        choice: lists are made where it says `number`, or is (0,).
    """
    lists_kernel(indices, gradients, topk_length, num_keys, lists, choice, number, plan).launch(
        grid=[lists.counts.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@cute.jit
def launch_counts(
    indices: cute.Tensor,
    gradients: cute.Tensor,
    topk_length: cute.Tensor,
    num_keys: Int32,
    counts: cute.Tensor,
    named: cute.Tensor,
    step: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`; other arguments as in `launch_lists`.

    Args:
        counts, named: (samples,) int32, written: keys of groups 0, step, ..., and gradients of all
            their queries, one by one.
    """
    count_kernel(indices, gradients, topk_length, num_keys, counts, named, step, plan).launch(
        grid=[counts.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream
    )
