"""Rows of the slots for each key of each list: a key's rows lie one after the other.

The groups are taken in parts that have room, each a run of whole batches of `unit_groups` groups;
the device finds the first group of a part. The groups that name a key are counted, and each takes
one of the key's rows, as it comes. A key's rows are then handed to its groups anew, in their order,
so that nothing depends on who came first. A list's last keys may be out of order, and named before:
their rows follow the order of the lists and lie before all others, so that the number of a key's
other rows is that of the groups that name it.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.grids import follow_grid, launch_ctas, place_in_grid
from flashdsa.dsl.warp import lowest_bit, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.choice import SECOND, is_taken
from flashdsa.kernels.attention.lists import MOST_UNORDERED, UNORDERED_SHIFT, Lists
from flashdsa.kernels.attention.sm90.bwd_per_item import plan

THREADS = 512
WARPS = THREADS // WARP_SIZE
SPLIT_THREADS = 1024
SM_CTAS = 4
"""CTAs on each streaming multiprocessor, of the kernels that take groups or keys one after another:
all that it has room for, so that CTAs that come early are spread evenly."""
KEYS_AHEAD, OWNERS_AHEAD = 8, 4
"""Keys of a list that a thread has in flight; rows of a key."""
HANDED_OUT, OUT_OF_ORDER, LISTED, TAKEN, FEW = range(plan.CURSORS)
"""Cursors of a part: rows that have an owner; rows of keys out of order; keys that have many rows
in order; those of them that a CTA has taken to sum; and keys that have few."""
MOST_FEW = 4
"""Groups that name a key of few rows, at most."""
MOST_OF_WARP = 512
"""Rows of a key from which on a CTA hands them over."""
WORD_BITS = 32
GROUP_WORDS = plan.MOST_PART_GROUPS // WORD_BITS
"""Words with a bit for each group of a part."""


class Offsets(NamedTuple):
    """Rows of dKV. Parts are numbered from 0; those after the last one are empty."""

    # (S_kv, 2) int32: groups of the part that name the key, 0 between parts; its next row
    named: cute.Tensor
    cursors: cute.Tensor  # (parts, CURSORS) int32
    begins: cute.Tensor  # (parts + 1,) int32: the first group of each part
    # (groups * row blocks,) int32: items of the parts, as CTAs take them by turns: see `tickets.py`
    order: cute.Tensor
    # (S_kv, KEY_WORDS) int32: key, first row, rows; of those that have many rows from the front on,
    # of those that have few from the back on.
    keys: cute.Tensor
    unordered: cute.Tensor  # (groups,) int32: row of the list's first key out of order
    # (room, 2) int32: group in the part and place in its list that have taken a row; of a row of a
    # key out of order the key.
    owners: cute.Tensor
    rows: cute.Tensor  # (groups, capacity) int32: of each key of a list


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
    lists: Lists, offsets: Offsets, room: Int32, unit_groups: Int32, choice: cute.Tensor
):
    """One CTA splits the groups, the others clear the keys' counts; see `launch_split`."""
    follow_grid()
    cta, _, _ = cute.arch.block_idx()
    taken = is_taken(choice, Int32(SECOND))
    if cta > 0:
        if taken:
            clear_counts(offsets)
    else:
        split_groups(lists, offsets, room, unit_groups, taken)


@cute.jit
def clear_counts(offsets: Offsets) -> None:
    """Write 0 to the keys' counts; all CTAs but the first one call."""
    thread, cta, num_ctas = place_in_grid()
    keys, step = Int32(offsets.named.shape[0]), (num_ctas - 1) * SPLIT_THREADS
    for key in cutlass.range((cta - 1) * SPLIT_THREADS + thread, keys, step, unroll=4):
        offsets.named[key, 0] = Int32(0)


@cute.jit
def split_groups(
    lists: Lists, offsets: Offsets, room: Int32, unit_groups: Int32, taken: Boolean
) -> None:
    """Write the first group of each part; arguments as in `launch_split`."""
    begins, sizes = offsets.begins, offsets.unordered
    thread, _, _ = cute.arch.thread_idx()
    groups = Int32(lists.counts.shape[0]) if taken else Int32(0)
    units = (groups + unit_groups - 1) // unit_groups
    least = (room + plan.MOST_PART_GROUPS - 1) // plan.MOST_PART_GROUPS
    for unit in cutlass.range(thread // WARP_SIZE, units, SPLIT_THREADS // WARP_SIZE, unroll=1):
        size = Int32(0)
        end = cutlass.min((unit + 1) * unit_groups, groups)
        for group in cutlass.range(unit * unit_groups + thread % WARP_SIZE, end, WARP_SIZE):
            size += cutlass.max(lists.counts[group], least)
        size = cute.arch.warp_redux_sync(size, "add")
        if thread % WARP_SIZE == 0:
            sizes[unit] = size
    cute.arch.sync_threads()
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
def sums_up_to(
    value: Int32, shared: Any, thread: Int32, threads: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """(sum over the CTA's threads up to this one, sum over all). All of them call. `shared`:
    pointer to a word of shared memory for each warp."""
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    upto, total = prefix_sum(value, lane), Int32(0)
    # The sums before may be written over when all have read them.
    cute.arch.sync_threads()
    if lane == WARP_SIZE - 1:
        (shared + warp).store(upto)
    cute.arch.sync_threads()
    for other in cutlass.range_constexpr(threads // WARP_SIZE):
        of_warp = (shared + other).load()
        total += of_warp
        if other < warp:
            upto += of_warp
    return upto, total


@cute.kernel
def count_kernel(lists: Lists, offsets: Offsets, number: Int32):
    """Count the groups that name each key, a group at a time in each CTA."""
    follow_grid()
    thread, cta, num_ctas = place_in_grid()
    part = part_of(offsets, number)
    for group in cutlass.range(part.begin + cta, part.end, num_ctas, unroll=1):
        count = lists.counts[group]
        ordered = count - unordered_of(lists, group, count)
        line = lists.rows.iterator + Int64(group) * lists.rows.shape[1]
        for place in cutlass.range(thread, ordered, THREADS, unroll=KEYS_AHEAD):
            counter = offsets.named.iterator + Int64((line + place).load()) * plan.PAIR
            cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")


@cute.kernel
def start_kernel(offsets: Offsets, number: Int32):
    """Find the first row of each key that is named; a thread for each key."""
    follow_grid()
    thread, cta, num_ctas = place_in_grid()
    shared = cutlass.memory.SmemAllocator().allocate_array(Int32, WARPS + 1)
    part = part_of(offsets, number)
    keys = Int32(offsets.named.shape[0])
    if part.begin == part.end:
        keys = Int32(0)
    for base in cutlass.range(cta * THREADS, keys, num_ctas * THREADS, unroll=1):
        key = base + thread
        count = Int32(0)
        if key < keys:
            count = offsets.named[key, 0]
        first = first_row(offsets, number, count, shared, thread)
        list_key(offsets, number, key, first, count)
        if count > 0:
            offsets.named[key, 0] = Int32(0)
            offsets.named[key, 1] = first


@cute.jit
def first_row(offsets: Offsets, number: Int32, count: Int32, shared: Any, thread: Int32) -> Int32:
    """The first of `count` rows that no other thread has. All threads of the CTA call. `shared`:
    pointer to a word of shared memory for each warp, and one."""
    upto, _ = sums_up_to(count, shared, thread, THREADS)
    if thread == THREADS - 1:
        cursor = offsets.cursors.iterator + (plan.CURSORS * number + HANDED_OUT)
        got = cute.arch.atomic_add(cursor, upto, sem="relaxed", scope="gpu")
        (shared + WARPS).store(got)
    cute.arch.sync_threads()
    return upto - count + (shared + WARPS).load()


@cute.jit
def list_key(offsets: Offsets, number: Int32, key: Int32, first: Int32, count: Int32) -> None:
    """All lanes: put the key, if it has rows, into one of the lists of keys, in any order."""
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
        pointer = offsets.cursors.iterator + (plan.CURSORS * number + cursor)
        at = cute.arch.atomic_add(pointer, Int32(cute.arch.popc(lanes)), sem="relaxed", scope="gpu")
    at = cute.arch.shuffle_sync(at, 0)
    return at + Int32(cute.arch.popc(lanes & Int32(cute.arch.lanemask_lt())))


@cute.kernel
def take_kernel(lists: Lists, offsets: Offsets, number: Int32):
    """Take a row for each key of the groups' lists, a group at a time in each CTA."""
    follow_grid()
    thread, cta, num_ctas = place_in_grid()
    part = part_of(offsets, number)
    for group in cutlass.range(part.begin + cta, part.end, num_ctas, unroll=1):
        count = lists.counts[group]
        ordered = count - unordered_of(lists, group, count)
        line = Int64(group) * lists.rows.shape[1]
        for first in cutlass.range(thread, ordered, KEYS_AHEAD * THREADS, unroll=1):
            take_rows(lists, offsets, (line, group - part.begin), first, ordered)
        for place in cutlass.range(ordered + thread, count, THREADS, unroll=1):
            row = offsets.unordered[group] + (place - ordered)
            (offsets.rows.iterator + (line + place)).store(row)
            offsets.owners[row, 0] = (lists.rows.iterator + (line + place)).load()


@cute.jit
def take_rows(
    lists: Lists, offsets: Offsets, of_group: tuple[Int64, Int32], first: Int32, ordered: Int32
) -> None:
    """Take rows for the thread's places from `first` on, which are under way together. `of_group`:
    where the list begins; number of the group in its part. `ordered`: places."""
    line, in_part = of_group
    places = [first + i * THREADS for i in range(KEYS_AHEAD)]
    keys, rows = [], []
    for place in places:
        key = Int32(-1)
        if place < ordered:
            key = (lists.rows.iterator + (line + place)).load()
        keys.append(key)
    for key in keys:
        row = Int32(0)
        if key >= 0:
            cursor = offsets.named.iterator + (Int64(key) * plan.PAIR + 1)
            row = cute.arch.atomic_add(cursor, Int32(1), sem="relaxed", scope="gpu")
        rows.append(row)
    for place, key, row in zip(places, keys, rows, strict=True):
        if key >= 0:
            offsets.owners[row, 0] = in_part
            offsets.owners[row, 1] = place


class Owner(NamedTuple):
    """The group that has taken a row."""

    in_part: Int32
    place: Int32


def owner_of(offsets: Offsets, row: Int32) -> Owner:
    """The group that has taken a row."""
    at = offsets.owners.iterator + Int64(row) * plan.PAIR
    return Owner(*prims.load_ext(at.to_llvm_ptr(), dtype=Int32, count=plan.PAIR))


@cute.jit
def hand_over(offsets: Offsets, part: Part, owner: Owner, row: Int32) -> None:
    """Give a row to the group that is next in order."""
    line = Int64(part.begin + owner.in_part) * offsets.rows.shape[1]
    (offsets.rows.iterator + (line + owner.place)).store(row)


@cute.kernel
def order_kernel(offsets: Offsets, number: Int32):
    """Hand the rows of each key to its groups in order: a thread for a key of few rows, a warp for
    one of many, and a CTA for one of most."""
    follow_grid()
    thread, cta, num_ctas = place_in_grid()
    allocator = cutlass.memory.SmemAllocator()
    words = allocator.allocate_array(Int32, (WARPS + 1) * plan.PAIR * GROUP_WORDS)
    part = part_of(offsets, number)
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    own_words = words + (warp + 1) * (plan.PAIR * GROUP_WORDS)
    listed = offsets.cursors[number, LISTED]
    # The keys of neighbouring rows of kv, which may all have many rows, are those of other CTAs.
    for first in cutlass.range(cta, listed, num_ctas * WARPS, unroll=1):
        place = first + lane % WARPS * num_ctas
        count = listed_key(offsets, cutlass.min(place, listed - 1)).count
        is_there = (lane < WARPS) & (place < listed)
        # Every warp finds the same keys.
        most = cute.arch.vote_ballot_sync(is_there & (count >= MOST_OF_WARP))
        place = first + warp * num_ctas
        if place < listed and (most >> warp) & 1 == 0:
            order_many(offsets, part, own_words, listed_key(offsets, place), lane, WARP_SIZE)
        while most != 0:
            rows = listed_key(offsets, first + lowest_bit(most) * num_ctas)
            order_many(offsets, part, words, rows, thread, THREADS)
            most = most & (most - 1)
    few, last = offsets.cursors[number, FEW], Int32(offsets.keys.shape[0]) - 1
    for place in cutlass.range(cta * THREADS + thread, few, num_ctas * THREADS, unroll=1):
        order_few(offsets, part, listed_key(offsets, last - place))


class ListedKey(NamedTuple):
    """A key that has rows."""

    key: Int32
    first: Int32  # its first row
    count: Int32  # its rows


def listed_key(offsets: Offsets, place: Int32) -> ListedKey:
    """The key at that place of the keys."""
    line = offsets.keys.iterator + Int64(place) * plan.KEY_WORDS
    found = prims.load_ext(line.to_llvm_ptr(), dtype=Int32, count=plan.KEY_WORDS)
    return ListedKey(*(found[i] for i in range(plan.KEY_WORDS - 1)))


@cute.jit
def order_few(offsets: Offsets, part: Part, rows: ListedKey) -> None:
    """Hand over the rows of a key that at most MOST_FEW groups name."""
    owners = []
    for i in cutlass.range_constexpr(MOST_FEW):
        last = rows.first + cutlass.min(Int32(i), rows.count - 1)
        owners.append(owner_of(offsets, last))
    for i in cutlass.range_constexpr(MOST_FEW):
        before = Int32(0)
        for j in cutlass.range_constexpr(MOST_FEW):
            if j < rows.count and owners[j].in_part < owners[i].in_part:
                before += 1
        if i < rows.count:
            hand_over(offsets, part, owners[i], rows.first + before)


def owners_from(offsets: Offsets, first: Int32, end: Int32) -> list[Owner]:
    """The groups that have taken OWNERS_AHEAD rows; rows from `end` on are the one before it."""
    rows = [cutlass.min(first + i, end - 1) for i in range(OWNERS_AHEAD)]
    return [owner_of(offsets, row) for row in rows]


@cute.jit
def order_many(
    offsets: Offsets,
    part: Part,
    words: Any,
    rows: ListedKey,
    thread: Int32,
    threads: cutlass.Constexpr,
) -> None:
    """Hand over the rows of a key. All `threads` of a warp, or of the CTA, call. `words`: shared
    memory of theirs: GROUP_WORDS words with a bit for each group of a part, and as many that count
    the bits before each."""
    before = words + GROUP_WORDS
    for at in cutlass.range(thread, GROUP_WORDS, threads, unroll=1):
        (words + at).store(Int32(0))
    sync(threads)
    # A thread's rows follow each other: neighbours, whose groups may be neighbours, would set bits
    # of one word at the same time.
    each = (rows.count + (threads - 1)) // threads
    end = cutlass.min((thread + 1) * each, rows.count)
    for i in cutlass.range(thread * each, end, OWNERS_AHEAD, unroll=1):
        for owner in owners_from(offsets, rows.first + i, rows.first + end):
            bit = Int32(1) << (owner.in_part % WORD_BITS)
            word = words + owner.in_part // WORD_BITS
            cute.arch.atomic_or(word, bit, sem="relaxed", scope="cta")
    # Every bit is set.
    sync(threads)
    if thread < WARP_SIZE:
        sum_before = rows.first
        for i in cutlass.range_constexpr(GROUP_WORDS // WARP_SIZE):
            at = i * WARP_SIZE + thread
            own = Int32(cute.arch.popc((words + at).load()))
            upto = prefix_sum(own, thread)
            (before + at).store(sum_before + upto - own)
            sum_before += cute.arch.shuffle_sync(upto, WARP_SIZE - 1)
    # The rows before each word are there.
    sync(threads)
    for i in cutlass.range(thread * each, end, OWNERS_AHEAD, unroll=1):
        for number, owner in enumerate(owners_from(offsets, rows.first + i, rows.first + end)):
            word, below = owner.in_part // WORD_BITS, (Int32(1) << (owner.in_part % WORD_BITS)) - 1
            row = (before + word).load() + Int32(cute.arch.popc((words + word).load() & below))
            if i + number < end:
                hand_over(offsets, part, owner, row)
    # The words may be written for the next key.
    sync(threads)


def sync(threads: int) -> None:
    """All `threads` of a warp, or of the CTA, meet."""
    if threads == WARP_SIZE:
        cute.arch.sync_warp()
    else:
        cute.arch.sync_threads()


@cute.jit
def launch_split(
    lists: Lists,
    offsets: Offsets,
    room: Int32,
    unit_groups: Int32,
    num_sms: Int32,
    choice: cute.Tensor,
    stream: Any,
):
    """Launch on `stream`.

    Args:
        lists: existing ones. offsets.begins and the counts of `named` are written;
            offsets.unordered is scratch.
        room: keys of a part's lists; at least `unit_groups` lists of `capacity` keys each.
        num_sms: streaming multiprocessors.
        choice: all parts are empty if it says FIRST, see `choice.py`.
    """
    made = split_kernel(lists, offsets, room, unit_groups, choice)
    launch_ctas(made, num_sms + 1, SPLIT_THREADS, stream, use_pdl=True)


@cute.jit
def launch_offsets(lists: Lists, offsets: Offsets, number: Int32, num_sms: Int32, stream: Any):
    """Launch on `stream` behind `launch_turns`: the rows of all keys of a part's lists."""
    num_ctas = num_sms * SM_CTAS
    of_lists = lists, offsets, number
    for made in (
        count_kernel(*of_lists),
        start_kernel(offsets, number),
        take_kernel(*of_lists),
        order_kernel(offsets, number),
    ):
        launch_ctas(made, num_ctas, THREADS, stream, use_pdl=True)
