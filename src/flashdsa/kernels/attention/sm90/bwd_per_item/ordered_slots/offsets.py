"""Rows of the slots for each key of each list: a key's rows lie one after the other.

The groups are taken in parts that have room, each a run of whole batches of `unit_groups` groups;
the device finds the first group of a part. Every key has a bit for each group of a part, set if the
group's list names it. The bits of all groups give the number of the key's rows, those of the
previous groups the index of a group's row. A list's last keys may be out of order, and named
before: their rows follow the order of the lists and lie before all others, so that the number of a
key's other rows is that of its bits.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.warp import prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.choice import SECOND, is_taken
from flashdsa.kernels.attention.lists import MOST_UNORDERED, UNORDERED_SHIFT, Lists
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import (
    CURSORS,
    MOST_PART_GROUPS,
    PAIR,
    WORD_BITS,
)

THREADS = 256
SPLIT_THREADS = 1024
SM_CTAS = 4
"""CTAs on each streaming multiprocessor, of the kernels that take groups or keys one after
another."""
WORDS_AHEAD, KEYS_AHEAD = 16, 8
"""Loads that a thread has in flight, of a key and of a list."""
HANDED_OUT, OUT_OF_ORDER, LISTED, TAKEN, FEW = range(CURSORS)
"""Cursors of a part: rows that have an owner; rows of keys out of order; keys that have many rows
in order; those of them that a CTA has taken to sum; and keys that have few."""
MOST_FEW = 4
"""Groups that name a key of few rows, at most."""


class Offsets(NamedTuple):
    """Rows of dKV. Parts are numbered from 0; those after the last one are empty."""

    # (S_kv, words, 2) int32, for each word of 32 groups: the bits of the part's groups, 0 between
    # the parts, and the row of the first group.
    words: cute.Tensor
    cursors: cute.Tensor  # (parts, CURSORS) int32
    begins: cute.Tensor  # (parts + 1,) int32: the first group of each part
    # (groups * row blocks,) int32: items of the parts, as CTAs take them by turns: see `turns.py`
    order: cute.Tensor
    # (S_kv, KEY_WORDS) int32: key, first row, rows; of those that have many rows from the front on,
    # of those that have few from the back on.
    keys: cute.Tensor
    unordered: cute.Tensor  # (groups,) int32: row of the list's first key out of order
    again: cute.Tensor  # (room,) int32: the keys out of order, each at its row's index
    rows: cute.Tensor  # (groups, capacity) int32: of each key of a list


def bits_at(offsets: Offsets, word: Any) -> Any:
    """Pointer to the bits of a word, counted from the first key's on; the first row follows
    them."""
    return offsets.words.iterator + word * PAIR


class Part(NamedTuple):
    """Groups from `begin` to `end`, exclusive."""

    number: Int32
    begin: Int32
    end: Int32


@cute.jit
def part_of(offsets: Offsets, number: Int32) -> Part:
    """The part of that number."""
    return Part(number, offsets.begins[number], offsets.begins[number + 1])


@cute.jit
def unordered_of(lists: Lists, group: Int32, count: Int32) -> Int32:
    """Number of the list's last keys that may be out of order."""
    unordered = lists.present[group] >> UNORDERED_SHIFT
    if unordered == MOST_UNORDERED:
        unordered = count
    return unordered


@cute.kernel
def split_kernel(
    lists: Lists,
    begins: cute.Tensor,
    sizes: cute.Tensor,
    room: Int32,
    unit_groups: Int32,
    choice: Any,
):
    """One CTA; arguments as in `launch_split`."""
    thread, _, _ = cute.arch.thread_idx()
    groups = Int32(lists.counts.shape[0])
    units = (groups + unit_groups - 1) // unit_groups
    least = (room + MOST_PART_GROUPS - 1) // MOST_PART_GROUPS
    for unit in cutlass.range(thread // WARP_SIZE, units, SPLIT_THREADS // WARP_SIZE, unroll=1):
        size = Int32(0)
        end = cutlass.min((unit + 1) * unit_groups, groups)
        for group in cutlass.range(unit * unit_groups + thread % WARP_SIZE, end, WARP_SIZE):
            size += cutlass.max(lists.counts[group], least)
        size = cute.arch.warp_redux_sync(size, "add")
        if thread % WARP_SIZE == 0:
            sizes[unit] = size
    cute.arch.sync_threads()
    taken = Boolean(True)
    if cutlass.const_expr(choice is not None):
        taken = is_taken(choice, Int32(SECOND))
    if not taken:
        units, groups = Int32(0), Int32(0)
    if thread == 0:
        part, used = Int32(0), Int32(0)
        begins[0] = Int32(0)
        for unit in cutlass.range(units, unroll=1):
            size = sizes[unit]
            if used > 0 and used + size > room:
                part += 1
                begins[part] = unit * unit_groups
                used = Int32(0)
            used += size
        for behind in cutlass.range(part + 1, begins.shape[0], unroll=1):
            begins[behind] = groups


@cute.jit
def sum_up_to(value: Int32, shared: Any, thread: Int32, threads: cutlass.Constexpr) -> Int32:
    """Sum over the CTA's threads up to this one. All of them call.

    Args:
        shared: pointer to a word of shared memory for each warp.
    """
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    upto = prefix_sum(value, lane)
    # The sums before may be written over when all have read them.
    cute.arch.sync_threads()
    if lane == WARP_SIZE - 1:
        (shared + warp).store(upto)
    cute.arch.sync_threads()
    for other in cutlass.range_constexpr(threads // WARP_SIZE):
        of_warp = (shared + other).load()
        if other < warp:
            upto += of_warp
    return upto


@cute.kernel
def mark_kernel(lists: Lists, offsets: Offsets, number: Int32):
    """Mark the bits of the groups' keys, a group at a time in each CTA."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    part = part_of(offsets, number)
    words = offsets.words.shape[1]
    for group in cutlass.range(part.begin + cta, part.end, num_ctas, unroll=1):
        count = lists.counts[group]
        ordered = count - unordered_of(lists, group, count)
        line = lists.rows.iterator + Int64(group) * lists.rows.shape[1]
        in_part = group - part.begin
        bit = Int32(1) << (in_part % WORD_BITS)
        for place in cutlass.range(thread, ordered, THREADS, unroll=KEYS_AHEAD):
            word = Int64((line + place).load()) * words + in_part // WORD_BITS
            cute.arch.atomic_or(bits_at(offsets, word), bit, sem="relaxed", scope="gpu")


@cute.kernel
def start_kernel(offsets: Offsets, number: Int32):
    """Find the first row of each key, and of each word's groups; a thread for each key."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    shared = cutlass.memory.SmemAllocator().allocate_array(Int32, THREADS // WARP_SIZE + 1)
    part = part_of(offsets, number)
    keys = Int32(offsets.words.shape[0])
    if part.begin == part.end:
        keys = Int32(0)
    used = (part.end - part.begin + (WORD_BITS - 1)) // WORD_BITS
    for base in cutlass.range(cta * THREADS, keys, num_ctas * THREADS, unroll=1):
        key = base + thread
        count = Int32(0)
        line = Int64(cutlass.min(key, keys - 1)) * offsets.words.shape[1]
        if key < keys:
            for word in cutlass.range(used, unroll=WORDS_AHEAD):
                count += Int32(cute.arch.popc(bits_at(offsets, line + word).load()))
        first = first_row(offsets, number, count, shared, thread)
        list_key(offsets, number, key, first, count)
        if count > 0:
            for word in cutlass.range(used, unroll=WORDS_AHEAD):
                at = bits_at(offsets, line + word)
                (at + 1).store(first)
                first += Int32(cute.arch.popc(at.load()))


@cute.jit
def first_row(offsets: Offsets, number: Int32, count: Int32, shared: Any, thread: Int32) -> Int32:
    """The first of `count` rows that no other thread has. All threads of the CTA call.

    Args:
        shared: pointer to a word of shared memory for each warp, and one.
    """
    upto = sum_up_to(count, shared, thread, THREADS)
    if thread == THREADS - 1:
        cursor = offsets.cursors.iterator + (CURSORS * number + HANDED_OUT)
        got = cute.arch.atomic_add(cursor, upto, sem="relaxed", scope="gpu")
        (shared + THREADS // WARP_SIZE).store(got)
    cute.arch.sync_threads()
    return upto - count + (shared + THREADS // WARP_SIZE).load()


@cute.jit
def list_key(offsets: Offsets, number: Int32, key: Int32, first: Int32, count: Int32) -> None:
    """Put the key, if it has rows, into one of the lists of keys, whose order is free. All lanes
    call."""
    few = (count > 0) & (count <= MOST_FEW)
    own = place_in_list(offsets, number, LISTED, count > MOST_FEW)
    back = place_in_list(offsets, number, FEW, few)
    if few:
        own = Int32(offsets.keys.shape[0]) - 1 - back
    if count > 0:
        offsets.keys[own, 0] = key
        offsets.keys[own, 1] = first
        offsets.keys[own, 2] = count


@cute.jit
def place_in_list(
    offsets: Offsets, number: Int32, cursor: cutlass.Constexpr, wanted: Boolean
) -> Int32:
    """A place behind a part's cursor for each lane that wants one. All lanes call."""
    lanes = cute.arch.vote_ballot_sync(wanted)
    at = Int32(0)
    if cute.arch.lane_idx() == 0 and lanes != 0:
        pointer = offsets.cursors.iterator + (CURSORS * number + cursor)
        at = cute.arch.atomic_add(pointer, Int32(cute.arch.popc(lanes)), sem="relaxed", scope="gpu")
    at = cute.arch.shuffle_sync(at, 0)
    return at + Int32(cute.arch.popc(lanes & Int32(cute.arch.lanemask_lt())))


@cute.kernel
def offset_kernel(lists: Lists, offsets: Offsets, number: Int32):
    """Write the row of each key of the groups' lists, a group at a time in each CTA."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    part = part_of(offsets, number)
    for group in cutlass.range(part.begin + cta, part.end, num_ctas, unroll=1):
        count = lists.counts[group]
        ordered = count - unordered_of(lists, group, count)
        line = Int64(group) * lists.rows.shape[1]
        in_part = group - part.begin
        in_front = (Int32(1) << (in_part % WORD_BITS)) - 1
        for place in cutlass.range(thread, ordered, THREADS, unroll=KEYS_AHEAD):
            key = (lists.rows.iterator + (line + place)).load()
            word = Int64(key) * offsets.words.shape[1] + in_part // WORD_BITS
            at = bits_at(offsets, word).to_llvm_ptr()
            both = prims.load_ext(at, dtype=Int32, count=PAIR)
            row = both[1] + Int32(cute.arch.popc(both[0] & in_front))
            (offsets.rows.iterator + (line + place)).store(row)
        for place in cutlass.range(ordered + thread, count, THREADS, unroll=1):
            row = offsets.unordered[group] + (place - ordered)
            (offsets.rows.iterator + (line + place)).store(row)
            offsets.again[row] = (lists.rows.iterator + (line + place)).load()


@cute.jit
def launch_split(
    lists: Lists,
    offsets: Offsets,
    room: Int32,
    unit_groups: Int32,
    choice: Any,
    stream: Any,
):
    """Launch on `stream`.

    Args:
        lists: existing ones. offsets.begins is written; offsets.unordered is scratch.
        room: keys of a part's lists; at least `unit_groups` lists of `capacity` keys each.
        choice: all parts are empty if it says FIRST, see `choice.py`; None: they are not.
    """
    split_kernel(lists, offsets.begins, offsets.unordered, room, unit_groups, choice).launch(
        grid=[1, 1, 1], block=[SPLIT_THREADS, 1, 1], stream=stream
    )


@cute.jit
def launch_offsets(lists: Lists, offsets: Offsets, number: Int32, num_sms: Int32, stream: Any):
    """Launch on `stream` behind `launch_turns`: the rows of all keys of a part's lists."""
    num_ctas = num_sms * SM_CTAS
    mark_kernel(lists, offsets, number).launch(
        grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
    start_kernel(offsets, number).launch(
        grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
    offset_kernel(lists, offsets, number).launch(
        grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
