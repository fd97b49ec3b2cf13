"""The union of the kv rows that a group of neighbouring queries names.

Each group has a CTA. Each row of a range has a byte in shared memory, or two, with a bit for each
query; those that are not 0 come out in an order that only they decide. A row that a query names
again comes again after them, in order, so that a group's list is the same every time. If very many
rows are named again, the group gets all its queries' slots one after another; likewise if a union
could not save what it costs. Over many rows there may be no more bits a row than queries of the
group: fewer ranges, and the same lists.

A list may be asked for in whole tiles. Then every number in it, up to the next multiple of `tile`,
is of a row that the group names, so that none needs a test before it is read.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from flashdsa.dsl.grids import follow_grid, launch_ctas, place_in_grid
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.smem import VECTOR, clear, load4
from flashdsa.dsl.warp import lowest_bit, neighbours_sum, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.choice import FIRST, SECOND, is_taken
from flashdsa.kernels.attention.lists import MOST_UNORDERED, UNORDERED_SHIFT, Lists
from flashdsa.kernels.attention.union_slots import (
    FAR_ROWS,
    MOST_REPEATS,
    RANGE_WORDS,
    STEP_WORDS,
    THREADS,
    WARPS,
    Shared,
    Slots,
    allocate_shared,
    can_pack,
    length_of,
)


def store_members(lists: Lists, place: Any, members: Any) -> None:
    """Store a row's bits."""
    (lists.members.iterator + place).store(lists.members.element_type(members))


SLOTS_AT_ONCE = 16
"""Slots of a thread, over all queries of the group; MOST_SLOTS of a query."""
MOST_SLOTS = 4


@cute.jit
def clear_range(x: Slots, shared: Shared, num_rows: Int32, thread: Int32) -> Int32:
    """Clear the rows' words; return the words of `num_rows` rows, in whole steps."""
    num_words = (num_rows + x.word_rows * STEP_WORDS - 1) // (x.word_rows * STEP_WORDS) * STEP_WORDS
    clear(shared.words, thread, num_words // VECTOR, THREADS)
    return num_words


def slots_at_once(group: int) -> int:
    """Slots of a query that a thread reads together."""
    return max(1, min(MOST_SLOTS, SLOTS_AT_ONCE // group))


@cute.jit
def mark(x: Slots, shared: Shared, base: Int32, thread: Int32) -> None:
    """Set the bits of the rows from `base` on that the queries name. A thread reads several slots
    before it looks at the first, and sets their bits before it checks whether one was set: neither
    step waits for the previous slot."""
    for start in cutlass.range(
        thread, Int32(x.indices.shape[1]), slots_at_once(x.group) * THREADS, unroll=1
    ):
        mark_several(x, shared, base, start, thread)


@cute.jit
def mark_several(x: Slots, shared: Shared, base: Int32, start: Int32, thread: Int32) -> None:
    """Mark the rows of slots start, start + THREADS, ... of each query."""
    rows = []
    first = opaque(x.first_query) if cutlass.const_expr(x.lean) else x.first_query
    for member in cutlass.range_constexpr(x.group):
        query = cutlass.min(first + member, Int32(x.indices.shape[0]) - 1)
        line = x.indices.iterator + Int64(query) * x.indices.shape[1]
        length = length_of(x, first + member)
        for i in cutlass.range_constexpr(slots_at_once(x.group)):
            slot = start + i * THREADS
            row = (line + cutlass.min(slot, Int32(x.indices.shape[1]) - 1)).load()
            rows.append(row if slot < length else Int32(-1))
    again = []
    for number in cutlass.range_constexpr(len(rows)):
        member = number // slots_at_once(x.group)
        again.append(set_bit(x, shared, rows[number], base, member, thread))
    repeated = again[0]
    for one in again[1:]:
        repeated = repeated | one
    if repeated != 0:
        for number in cutlass.range_constexpr(len(rows)):
            keep_repeat(shared, rows[number], again[number])


@cute.jit
def set_bit(
    x: Slots, shared: Shared, row: Int32, base: Int32, member: cutlass.Constexpr, thread: Int32
) -> Int32:
    """Set the member's bit of a row; return it, as bits of queries, if it was set before, else 0.
    No bit of any word is set for a row that is not valid, or of another range."""
    place = row - base
    word, bit, query = thread, Int32(0), Int32(0)
    if row >= 0 and row < x.num_keys and place >= 0 and place < RANGE_WORDS * x.word_rows:
        word = place // x.word_rows
        bit = Int32(1) << (place % x.word_rows * x.row_bits + member)
        query = Int32(1 << member)
    old = cute.arch.atomic_or(shared.words.iterator + word, bit, sem="relaxed", scope="cta")
    return query if (old & bit) != 0 else Int32(0)


@cute.jit
def keep_repeat(shared: Shared, row: Int32, query: Int32) -> None:
    """Keep a row that a query names again, if it does."""
    if query != 0:
        at = cute.arch.atomic_add(shared.num_repeats.iterator, Int32(1), sem="relaxed", scope="cta")
        if at < MOST_REPEATS:
            shared.repeats[at, 0] = row
            shared.repeats[at, 1] = query


@cute.jit
def note_present(x: Slots, shared: Shared, word: Int32) -> None:
    """Note that the queries of a word's rows name something."""
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
    """Note the bits that this thread counted in the words of a range."""
    total = neighbours_sum(own, WARP_SIZE)
    if cute.arch.lane_idx() == 0:
        cute.arch.atomic_add(shared.named.iterator, total, sem="relaxed", scope="cta")


def named_rows(x: Slots, word: Any) -> Any:
    """The highest bit of each named row in a word."""
    below = sum((1 << (x.row_bits - 1)) - 1 << (x.row_bits * i) for i in range(x.word_rows))
    highest = Int32(~below)
    return (((word & Int32(below)) + Int32(below)) | word) & highest


def four_words(shared: Shared, number: Any) -> list[Any]:
    """Words 4 number to 4 number + 3."""
    four = load4(shared.words, number)
    return [four[i] for i in range(VECTOR)]


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
    """Write the range's rows after the first `before`; return the number of rows then. Each warp
    has an equal part of the words, so that its rows follow those of the warps before. `num_words`:
    whole steps."""
    group, _, _ = cute.arch.block_idx()
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    share = num_words // (WARPS * VECTOR)
    first = warp * share
    mine, any_word, named = Int32(0), Int32(0), Int32(0)
    for at in cutlass.range(first + lane, first + share, WARP_SIZE, unroll=1):
        for word in four_words(shared, at):
            mine += Int32(cute.arch.popc(named_rows(x, word)))
            if cutlass.const_expr(x.tile > 0):
                any_word = any_word | word
                named += Int32(cute.arch.popc(word))
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
    if cute.arch.shuffle_sync(total, 0) > share * VECTOR:
        write_dense(x, shared, lists, base, (first * VECTOR, share * VECTOR), line + place)
    else:
        write_sparse(x, shared, lists, base, (first, share), line + place)
    cute.arch.sync_threads()
    return end


@cute.jit
def write_dense(
    x: Slots, shared: Shared, lists: Lists, base: Int32, words: tuple[Int32, Int32], to: Int64
) -> None:
    """Write the warp's rows, in ascending order, from index `to` on, if words have several: a lane
    takes one of 32 neighbouring rows, and neighbours write to neighbouring addresses. `words`:
    number of the first, and how many."""
    lane = cute.arch.lane_idx()
    first, count = words
    for start in cutlass.range(first, first + count, WARP_SIZE, unroll=1):
        for i in cutlass.range_constexpr(x.word_rows):
            row = start * x.word_rows + i * WARP_SIZE + lane
            word = shared.words[row // x.word_rows]
            members = (word >> (row % x.word_rows * x.row_bits)) & x.row_mask
            mask = Int32(cute.arch.vote_ballot_sync(members != 0))
            if members != 0:
                own = to + Int32(cute.arch.popc(mask & Int32(cute.arch.lanemask_lt())))
                (lists.rows.iterator + own).store(base + row)
                store_members(lists, own, members)
            to += Int32(cute.arch.popc(mask))


@cute.jit
def write_sparse(
    x: Slots, shared: Shared, lists: Lists, base: Int32, fours: tuple[Int32, Int32], to: Int64
) -> None:
    """Same as `write_dense`, if most words have no row: a lane takes four words. `fours`: number of
    the first four words, and how many fours."""
    lane = cute.arch.lane_idx()
    first, count = fours
    for start in cutlass.range(first, first + count, WARP_SIZE, unroll=1):
        words = four_words(shared, start + lane)
        rows = [named_rows(x, word) for word in words]
        mine = Int32(0)
        for one in rows:
            mine += Int32(cute.arch.popc(one))
        upto = prefix_sum(mine, lane)
        own = to + (upto - mine)
        row = base + (start + lane) * (VECTOR * x.word_rows)
        for i in cutlass.range_constexpr(VECTOR):
            own = write_word(x, lists, own, row + i * x.word_rows, words[i], rows[i])
        to += cute.arch.shuffle_sync(upto, WARP_SIZE - 1)


@cute.jit
def write_word(x: Slots, lists: Lists, to: Int64, first: Int32, word: Int32, rows: Int32) -> Int64:
    """Write a word's rows, from `first` on, to index `to`; return the index after them."""
    left = rows
    while left != 0:
        number = lowest_bit(left) // x.row_bits
        (lists.rows.iterator + to).store(first + number)
        store_members(lists, to, (word >> (number * x.row_bits)) & x.row_mask)
        to += 1
        left = left & (left - 1)
    return to


@cute.jit
def write_repeats(shared: Shared, lists: Lists, before: Int32, thread: Int32) -> Int32:
    """Write the repeats after the first `before` rows, by row and query; return the new number."""
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


@cute.jit
def union_may_pay(x: Slots, least_saved: Int32) -> Boolean:
    """Whether a union may have so many slots less than the group's queries one after another."""
    together, longest = Int32(0), Int32(0)
    for member in cutlass.range_constexpr(x.group):
        length = length_of(x, x.first_query + member)
        together += length
        longest = cutlass.max(longest, length)
    return Boolean(together - longest >= least_saved)


@cute.kernel
def union_kernel(
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    lists: Lists,
    num_keys: Int32,
    group: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    choice: Any,
    grouping: cutlass.Constexpr = SECOND,
    packs: cutlass.Constexpr = False,
    least_saved: Any = None,
):
    """One group; arguments as in `launch_union`, packs: see `Slots`."""
    follow_grid()
    number, _, _ = cute.arch.block_idx()
    shared = allocate_shared(tile)
    lean = grouping == FIRST
    x = Slots(indices, topk_length, num_keys, number * group, group, tile, lean, packs)
    if is_taken(choice, Int32(grouping)):
        make_list(x, shared, lists, least_saved)


@cute.jit
def make_list(x: Slots, shared: Shared, lists: Lists, least_saved: Any = None) -> None:
    """Write the group's list. `least_saved`: see `launch_union`."""
    thread, number, _ = place_in_grid()
    num_keys, tile = x.num_keys, x.tile
    if thread == 0:
        shared.num_repeats[0] = Int32(0)
        if cutlass.const_expr(tile > 0):
            shared.present[0] = Int32(0)
            shared.named[0] = Int32(0)
            shared.named[1] = Int32(0)
    count, takes_all = Int32(0), Boolean(False)
    if cutlass.const_expr(least_saved is not None):
        if not union_may_pay(x, least_saved):
            takes_all, num_keys = Boolean(True), Int32(0)
            # num_repeats is read below.
            cute.arch.sync_threads()
    for base in cutlass.range(0, num_keys, RANGE_WORDS * x.word_rows, unroll=1):
        num_rows = cutlass.min(num_keys - base, Int32(RANGE_WORDS * x.word_rows))
        num_words = clear_range(x, shared, num_rows, thread)
        cute.arch.sync_threads()
        mark(x, shared, Int32(base), thread)
        cute.arch.sync_threads()
        count = write_range(x, shared, lists, Int32(base), num_words, count, thread)
    if takes_all or shared.num_repeats[0] > MOST_REPEATS:
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
    grouping: cutlass.Constexpr = SECOND,
    packs: cutlass.Constexpr = False,
    least_saved: Any = None,
):
    """Launch on `stream`.

    Args:
        indices: (S, topk) int32. topk_length: (S,) int32, or (0,). lists: written.
        num_keys: S_kv, at least 1. group: queries of a group, 1 to 16.
        tile: lists are made up to a multiple of it, at most THREADS; 0: they are not.
        choice: lists are made if it says `grouping`, see `choice.py`; None: they are made.
        packs: rows beyond FAR_ROWS have no more bits in shared memory than they need.
        least_saved: Int32, of lists that are not made up: a list has all slots of its queries if a
            union could not have so many less; None: it is a union in any case.
    """

    def launch(packed: bool) -> None:
        slots, made_if = (indices, topk_length), (choice, grouping)
        made = union_kernel(*slots, lists, num_keys, group, tile, *made_if, packed, least_saved)
        launch_ctas(made, lists.counts.shape[0], THREADS, stream, use_pdl=True)

    launch_by_rows(num_keys, launch, packs and can_pack(group))


@cute.jit
def launch_by_rows(num_keys: Int32, launch: cutlass.Constexpr, packs: cutlass.Constexpr):
    """Launch the kernel that packs, if there is one and rows are many, or else the other."""
    if cutlass.const_expr(packs):
        if num_keys > FAR_ROWS:
            launch(True)
        else:
            launch(False)
    else:
        launch(False)
