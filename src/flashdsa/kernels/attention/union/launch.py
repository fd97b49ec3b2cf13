"""The union of the kv rows that a group of neighbouring queries names.

Each group has a CTA. Each row of a range has a byte in shared memory, or two, with a bit for each
query; those that are not 0 come out in an order that only they decide. A row that a query names
again comes again after them, in order, so that a group's list is the same every time. If very many
rows are named again, the group gets all its queries' slots one after another.

A list may be asked for in whole tiles. Then every number in it, up to the next multiple of `tile`,
is of a row that the group names, so that none needs a test before it is read.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.opaque import opaque
from flashdsa.kernels.attention.union.choice import SECOND, is_taken
from flashdsa.kernels.attention.union.memory import (
    MOST_REPEATS,
    MOST_UNORDERED,
    RANGE_WORDS,
    THREADS,
    UNORDERED_SHIFT,
    Lists,
    Shared,
    Slots,
    allocate_shared,
    length_of,
    store_members,
)
from flashdsa.kernels.attention.union.range import clear_range, mark, write_range

__all__ = ["Lists", "launch_union"]


@cute.jit
def write_repeats(shared: Shared, lists: Lists, before: Int32, thread: Int32) -> Int32:
    """Write the repeats after the first `before` rows, by row and query; return the number of rows
    then."""
    group, _, _ = cute.arch.block_idx()
    line = Int64(group) * lists.rows.shape[1] + before
    count = shared.num_repeats[0]
    for own in cutlass.range(thread, count, THREADS, unroll=1):
        row, members = shared.repeats[own, 0], shared.repeats[own, 1]
        place = Int32(0)
        for other in cutlass.range(count, unroll=4):
            other_row, other_members = shared.repeats[other, 0], shared.repeats[other, 1]
            if other_row < row:
                place += 1
            if other_row == row and other_members < members:
                place += 1
            if other_row == row and other_members == members and other < own:
                place += 1
        (lists.rows.iterator + (line + place)).store(row)
        store_members(lists, line + place, members)
    return before + count


@cute.jit
def write_all_slots(x: Slots, shared: Shared, lists: Lists, thread: Int32) -> Int32:
    """Write every slot of the group's queries, each of one member; return their number."""
    group, _, _ = cute.arch.block_idx()
    none = Int32(-1)
    if cutlass.const_expr(x.tile > 0):
        none = shared.repeats[0, 0]
    # Computed here: kept from the kernel's start on, for this rare path, it would be spilled.
    line = Int64(opaque(group)) * lists.rows.shape[1]
    before = Int32(0)
    for member in cutlass.range_constexpr(x.group):
        query = x.first_query + member
        length = length_of(x, query)
        at = x.indices.iterator + Int64(query) * x.indices.shape[1]
        for slot in cutlass.range(thread, length, THREADS, unroll=1):
            row = (at + slot).load()
            members = Int32(1 << member)
            if row < 0 or row >= x.num_keys:
                row, members = none, Int32(0)
            (lists.rows.iterator + (line + before + slot)).store(row)
            store_members(lists, line + before + slot, members)
        before += length
    return before


@cute.jit
def fill_tile(x: Slots, lists: Lists, count: Int32, thread: Int32) -> None:
    """Repeat rows of the list, of no member, up to a whole tile; count > 0. All threads call."""
    group, _, _ = cute.arch.block_idx()
    cute.arch.sync_threads()
    line = Int64(group) * lists.rows.shape[1]
    place = count + thread
    if place < (count + x.tile - 1) // x.tile * x.tile:
        row = (lists.rows.iterator + (line + thread % count)).load()
        (lists.rows.iterator + (line + place)).store(row)
        store_members(lists, line + place, Int32(0))


@cute.kernel
def union_kernel(
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    lists: Lists,
    num_keys: Int32,
    group: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    choice: Any,
):
    """One group; arguments as in `launch_union`."""
    number, _, _ = cute.arch.block_idx()
    shared = allocate_shared(tile)
    x = Slots(indices, topk_length, num_keys, number * group, group, tile)
    if cutlass.const_expr(choice is None):
        make_list(x, shared, lists)
    else:
        if is_taken(choice, Int32(SECOND)):
            make_list(x, shared, lists)


@cute.jit
def make_list(x: Slots, shared: Shared, lists: Lists) -> None:
    """Write the group's list."""
    thread, _, _ = cute.arch.thread_idx()
    number, _, _ = cute.arch.block_idx()
    num_keys, tile = x.num_keys, x.tile
    if thread == 0:
        shared.num_repeats[0] = Int32(0)
        if cutlass.const_expr(tile > 0):
            shared.present[0] = Int32(0)
            shared.named[0] = Int32(0)
            shared.named[1] = Int32(0)
    count = Int32(0)
    for base in cutlass.range(0, num_keys, RANGE_WORDS * x.word_rows, unroll=1):
        num_rows = cutlass.min(num_keys - base, Int32(RANGE_WORDS * x.word_rows))
        num_words = clear_range(x, shared, num_rows, thread)
        cute.arch.sync_threads()
        mark(x, shared, Int32(base), thread)
        cute.arch.sync_threads()
        count = write_range(x, shared, lists, Int32(base), num_words, count, thread)
    if shared.num_repeats[0] > MOST_REPEATS:
        count = write_all_slots(x, shared, lists, thread)
    elif shared.num_repeats[0] > 0:
        count = write_repeats(shared, lists, count, thread)
    if cutlass.const_expr(tile > 0):
        if count > 0:
            fill_tile(x, lists, count, thread)
    if thread == 0:
        lists.counts[number] = count
        if cutlass.const_expr(tile > 0):
            repeats = shared.num_repeats[0]
            unordered = repeats if repeats <= MOST_REPEATS else Int32(MOST_UNORDERED)
            lists.present[number] = shared.present[0] | (unordered << UNORDERED_SHIFT)
            lists.named[number] = shared.named[0] + repeats


@cute.jit
def launch_union(
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    lists: Lists,
    num_keys: Int32,
    group: cutlass.Constexpr,
    stream: Any,
    tile: cutlass.Constexpr = 0,
    choice: Any = None,
):
    """Launch on `stream`.

    Args:
        indices: (S, topk) int32. topk_length: (S,) int32, or (0,). lists: written.
        num_keys: S_kv, at least 1. group: queries of a group, 1 to 16.
        tile: lists are made up to a multiple of it, at most THREADS; 0: they are not.
        choice: lists are made if it says SECOND, see `choice.py`; None: they are made.
    """
    union_kernel(indices, topk_length, lists, num_keys, group, tile, choice).launch(
        grid=[lists.counts.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream
    )
