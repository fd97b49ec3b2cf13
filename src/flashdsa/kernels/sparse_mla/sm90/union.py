"""The union of the kv rows that a group of neighbouring queries names.

A CTA a group. Each row of a range has a byte in shared memory, or two, a bit a query; those that
are not 0 come out in ascending order. Where a query names a row again, the row comes again behind
them, in order too, so that a group's list is the same every time. Where very many do, the group
gets all its queries' slots one after another.

A list may be asked for in whole tiles. Then every number in it, up to the next multiple of `tile`,
is of a row that the group names, so that none needs a test before it is read.
"""

import math
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.memory import SmemAllocator

from flashdsa.dsl.warp import neighbours_sum, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.sparse_mla.sm90.choice import SECOND, is_taken
from flashdsa.kernels.sparse_mla.sm90.members import members_bits

THREADS = 512
WARPS = THREADS // WARP_SIZE
RANGE_WORDS = 16_384
"""Words of shared memory for a range of rows: they leave room for three CTAs on an SM."""
WORD_BITS = 32
MOST_REPEATS = 1024
STEP_WORDS = WARP_SIZE
"""Words that a warp looks at together."""


class Slots(NamedTuple):
    """What the group's queries name."""

    indices: cute.Tensor  # (S, topk) int32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    num_keys: Int32
    first_query: Int32
    group: cutlass.Constexpr  # queries
    tile: cutlass.Constexpr  # see Lists; 0: not asked for

    @property
    def row_bits(self) -> int:
        """Of a row, in shared memory and in `members`."""
        return members_bits(self.group)

    @property
    def word_rows(self) -> int:
        """Rows of a word."""
        return WORD_BITS // self.row_bits

    @property
    def row_mask(self) -> int:
        """A row's bits, of the lowest row of a word."""
        return (1 << self.row_bits) - 1


class Shared(NamedTuple):
    """Shared memory."""

    words: cute.Tensor  # (RANGE_WORDS,) Int32: the rows' bits
    counts: cute.Tensor  # (WARPS,) Int32: rows that each warp found
    repeats: cute.Tensor  # (MOST_REPEATS, 2) Int32: row and bits of one that a query names again
    num_repeats: cute.Tensor  # (1,) Int32; no more than MOST_REPEATS of them are kept
    present: Any  # with whole tiles (1,) Int32: queries that name a row
    named: Any  # with whole tiles (2,) Int32, of which the first: rows of all queries, one by one


class Lists(NamedTuple):
    """Where the union goes, row `group` of each."""

    rows: cute.Tensor  # (groups, capacity) int32; capacity is at least group * topk
    members: cute.Tensor  # (groups, capacity) uint8 or uint16: bit i: query i of the group names it
    counts: cute.Tensor  # (groups,) int32
    present: Any = None  # with whole tiles (groups,) int32: bit i: query i names any row
    named: Any = None  # with whole tiles (groups,) int32: rows of all queries, one by one


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
def mark(x: Slots, shared: Shared, base: Int32, thread: Int32) -> None:
    """Set the bits of the rows from `base` on that the queries name."""
    for member in cutlass.range_constexpr(x.group):
        query = x.first_query + member
        line = x.indices.iterator + Int64(query) * x.indices.shape[1]
        for slot in cutlass.range(thread, length_of(x, query), THREADS, unroll=4):
            row = (line + slot).load()
            place = row - base
            if row >= 0 and row < x.num_keys and place >= 0 and place < RANGE_WORDS * x.word_rows:
                bit = Int32(1) << (place % x.word_rows * x.row_bits + member)
                word = shared.words.iterator + place // x.word_rows
                old = cute.arch.atomic_or(word, bit, sem="relaxed", scope="cta")
                if (old & bit) != 0:
                    at = cute.arch.atomic_add(
                        shared.num_repeats.iterator, Int32(1), sem="relaxed", scope="cta"
                    )
                    if at < MOST_REPEATS:
                        shared.repeats[at, 0] = row
                        shared.repeats[at, 1] = Int32(1 << member)


@cute.jit
def note_present(x: Slots, shared: Shared, word: Int32) -> None:
    """The queries of a word's rows name something."""
    members = Int32(0)
    for i in cutlass.range_constexpr(x.word_rows):
        members = members | (word >> (x.row_bits * i))
    for member in cutlass.range_constexpr(x.group):
        if cute.arch.vote_any_sync((members >> member) & 1 == 1):
            if cute.arch.lane_idx() == 0:
                cute.arch.atomic_or(
                    shared.present.iterator, Int32(1 << member), sem="relaxed", scope="cta"
                )


@cute.jit
def note_named(shared: Shared, own: Int32) -> None:
    """Bits that this thread counted in the words of a range."""
    total = neighbours_sum(own, WARP_SIZE)
    if cute.arch.lane_idx() == 0:
        cute.arch.atomic_add(shared.named.iterator, total, sem="relaxed", scope="cta")


@cute.jit
def rows_in(x: Slots, word: Int32) -> Int32:
    """How many of the word's rows are named."""
    count = Int32(0)
    for i in cutlass.range_constexpr(x.word_rows):
        if (word >> (x.row_bits * i)) & x.row_mask != 0:
            count += 1
    return count


@cute.jit
def write_range(
    x: Slots,
    shared: Shared,
    lists: Lists,
    base: Int32,
    num_words: Int32,
    before: Int32,
    thread: Int32,
) -> Int32:
    """The range's rows behind the `before` that there are; returns how many there are then.

    Each warp has an equal part of the words, so that its rows follow those of the warps before.
    """
    group, _, _ = cute.arch.block_idx()
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    share = (num_words + THREADS - 1) // THREADS * STEP_WORDS
    first = warp * share
    last = cutlass.min(first + share, num_words)
    mine, any_word, named = Int32(0), Int32(0), Int32(0)
    for at in cutlass.range(first + lane, last, STEP_WORDS, unroll=1):
        mine += rows_in(x, shared.words[at])
        if cutlass.const_expr(x.tile > 0):
            any_word = any_word | shared.words[at]
            named += Int32(cute.arch.popc(shared.words[at]))
    if cutlass.const_expr(x.tile > 0):
        note_present(x, shared, any_word)
        note_named(shared, named)
    total = neighbours_sum(mine, WARP_SIZE)
    if lane == 0:
        shared.counts[warp] = total
    cute.arch.sync_threads()
    place, end = before, before
    for other in cutlass.range_constexpr(WARPS):
        count = shared.counts[other]
        end += count
        if other < warp:
            place += count
    line = Int64(group) * lists.rows.shape[1]
    for start in cutlass.range(first, last, STEP_WORDS, unroll=1):
        word = Int32(0)
        if start + lane < last:
            word = shared.words[start + lane]
        count = rows_in(x, word)
        upto = prefix_sum(count, lane)
        to = place + upto - count
        for i in cutlass.range_constexpr(x.word_rows):
            members = (word >> (x.row_bits * i)) & x.row_mask
            if members != 0:
                row = base + (start + lane) * x.word_rows + i
                (lists.rows.iterator + (line + to)).store(row)
                store_members(lists, line + to, members)
                to += 1
        place += cute.arch.shuffle_sync(upto, WARP_SIZE - 1)
    cute.arch.sync_threads()
    return end


def store_members(lists: Lists, place: Any, members: Any) -> None:
    """A row's bits."""
    (lists.members.iterator + place).store(lists.members.element_type(members))


@cute.jit
def write_repeats(shared: Shared, lists: Lists, before: Int32, thread: Int32) -> Int32:
    """The repeats behind the `before` rows that there are, by row and query; returns how many
    there are then."""
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
    """Every slot of the group's queries, each of one member; returns how many."""
    group, _, _ = cute.arch.block_idx()
    none = Int32(-1)
    if cutlass.const_expr(x.tile > 0):
        none = shared.repeats[0, 0]
    line = Int64(group) * lists.rows.shape[1]
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
    """Rows of the list again, of no member, up to a whole tile; count > 0. All threads call."""
    group, _, _ = cute.arch.block_idx()
    cute.arch.sync_threads()
    line = Int64(group) * lists.rows.shape[1]
    place = count + thread
    if place < (count + x.tile - 1) // x.tile * x.tile:
        row = (lists.rows.iterator + (line + thread % count)).load()
        (lists.rows.iterator + (line + place)).store(row)
        store_members(lists, line + place, Int32(0))


def allocate_shared(tile: int) -> Shared:
    """The kernel's shared memory."""
    allocator = SmemAllocator()

    def words(*shape: int) -> Any:
        pointer = allocator.allocate_array(Int32, math.prod(shape))
        order = tuple(reversed(range(len(shape))))
        return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=order))

    kept = [words(RANGE_WORDS), words(WARPS), words(MOST_REPEATS, 2), words(1)]
    # To 16 bytes: the compiler may load neighbouring words at once.
    noted = [words(1), words(2)] if tile > 0 else [None, None]
    return Shared(*kept, *noted)


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
    # The indices have been written, and nobody reads the lists that come into this memory.
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    x = Slots(indices, topk_length, num_keys, number * group, group, tile)
    if cutlass.const_expr(choice is None):
        make_list(x, shared, lists)
    else:
        if is_taken(choice, Int32(SECOND)):
            make_list(x, shared, lists)


@cute.jit
def make_list(x: Slots, shared: Shared, lists: Lists) -> None:
    """The group's list."""
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
        num_words = (num_rows + x.word_rows - 1) // x.word_rows
        for at in cutlass.range(thread, num_words, THREADS, unroll=4):
            shared.words[at] = Int32(0)
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
            lists.present[number] = shared.present[0]
            lists.named[number] = shared.named[0] + shared.num_repeats[0]


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
        choice: lists are made where it says SECOND, see `choice.py`; None: they are made.
    """
    union_kernel(indices, topk_length, lists, num_keys, group, tile, choice).launch(
        grid=[lists.counts.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
    )
