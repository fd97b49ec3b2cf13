"""Rows that several CTAs share: each publishes its best, the last to arrive ranks them all.

A part's *front* is its best few, all keys from its *cut* on; its *back* is the rest of its list,
with no key above its *bound*. The last CTA ranks the fronts, and reads a back only when the bound
is not below the last winner so far: then, and only then, the back may hold winners too. Nobody
waits for anybody, so that a CTA may start as late as it likes (other streams, other processes).
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.experimental import primitives as prims

from flashdsa.kernels.indexer.sm90.memory import (
    SCRATCH_CANDIDATES,
    SCRATCH_COUNT,
    SCRATCH_EXTREMES,
    SCRATCH_FRONT,
    SCRATCH_LAST,
    SCRATCH_PARTS,
    Ranking,
)
from flashdsa.kernels.indexer.sm90.plan import (
    HEADER_WORDS,
    NO_POSITION,
    NUM_BINS,
    SLOTS_PER_CTA,
    WARP_SIZE,
)
from flashdsa.kernels.indexer.sm90.score import sortable
from flashdsa.kernels.indexer.sm90.select import (
    LAST_POSITION,
    accepts,
    add_candidate,
    append,
    atomic_extreme,
    clear_histogram,
    consumer_prefix,
    consumer_sync,
    count_in_bin,
    find_bin,
    four_at,
    key_at,
    lowest_key,
    position_at,
    rank_candidates,
    take_place,
)
from flashdsa.problem import PAGE_SIZE

VOTE_BARRIER = 2
"""The named barrier that also votes."""
LOADED_TOGETHER = 4
"""Entries of a back that a lane has in flight."""
PAIRS_TOGETHER = 6
"""Pairs of front entries that a thread has in flight."""


class Workspace(NamedTuple):
    """Device memory of one launch at a time. Counters are 0 between launches."""

    arrivals: Any  # (rows,) int32: parts of the row that have published
    lists: Any  # (2 * CTAs, slot_words) int32: header, fronts of the row, list of the part


class Share(NamedTuple):
    """How a row is shared, and which part the caller is; see schedule.py."""

    parts: Int32
    part: Int32
    first_chunk: Int32
    odd_start: Int32
    row_pages: Int32
    head_pages: Int32
    chunk_pages: Int32


@cute.jit
def front_entries(share: Share, part: Int32, plan: cutlass.Constexpr) -> Int32:
    """Entries of a part's front, even: its share of the best, six standard deviations, and 8.

    With the best spread at random over the row, the fronts hold them all but in one of some
    thousand rows; then backs are read.
    """
    pages = share.chunk_pages
    if part == 0:
        pages = share.head_pages
    elif part == share.parts - 1:
        pages = share.row_pages - share.head_pages - (share.parts - 2) * share.chunk_pages
    expected = Float32(plan.topk) * Float32(pages) * cute.arch.rcp_approx(Float32(share.row_pages))
    wanted = Int32(expected + 6.0 * cute.math.sqrt(expected, fastmath=True)) + 9
    return cutlass.min(wanted // 2 * 2, Int32(plan.topk))


@cute.jit
def part_slot(share: Share, part: Int32) -> Int32:
    """Where a part publishes: the first one behind what its CTA published before."""
    slot = (share.first_chunk + part) * SLOTS_PER_CTA
    if part == 0:
        slot += share.odd_start
    return slot


@cute.jit
def slot_base(workspace: Workspace, slot: Int32, plan: cutlass.Constexpr) -> Any:
    """Pointer to a slot: its header."""
    return workspace.lists.iterator + Int64(slot) * plan.slot_words


@cute.jit
def row_fronts(workspace: Workspace, share: Share, plan: cutlass.Constexpr) -> Any:
    """Pointer to the row's fronts, one behind the other, in the slot of its first part."""
    return slot_base(workspace, part_slot(share, Int32(0)), plan) + HEADER_WORDS


@cute.jit
def front_offset(share: Share, part: Int32, plan: cutlass.Constexpr) -> Int32:
    """Entries in front of a part's front; of `share.parts`, all entries."""
    offset = Int32(0)
    if part > 0:
        offset = front_entries(share, Int32(0), plan)
        offset += (cutlass.min(part, share.parts - 1) - 1) * front_entries(share, Int32(1), plan)
        if part == share.parts:
            offset += front_entries(share, share.parts - 1, plan)
    return offset


@cute.jit
def publish(
    ranking: Ranking,
    workspace: Workspace,
    row: Int32,
    share: Share,
    first_page: Int32,
    entries: Int32,
    lowest: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> cutlass.Boolean:
    """Write front and list; True in the CTA that is the row's last. The histogram is the list's.

    The front is what lies above the bin of its size's rank: some entries fewer, for a cut that
    costs no comparison. Keys below `lowest` cannot win and are left out.
    """
    front = front_entries(share, share.part, plan)
    cut = Uint32(0)
    if entries > front:
        chosen, _, _ = find_bin(ranking, front, thread, plan)
        cut = lowest_key(chosen + 1)
    if thread < 3:
        ranking.scratch[SCRATCH_FRONT + thread] = Int32(0)
    consumer_sync(plan)
    base = slot_base(workspace, part_slot(share, share.part), plan)
    own_list = base + plan.first_list_word
    own_front = row_fronts(workspace, share, plan) + 2 * front_offset(share, share.part, plan)
    bound = Uint32(0)
    for first in cutlass.range(0, entries, plan.consumer_threads, unroll=1):
        i = first + thread
        key = Uint32(0)
        in_front = cutlass.Boolean(False)
        position = Uint32(0)
        if i < entries:
            key = key_at(ranking, i)
            position = position_at(ranking, i)
            in_front = key >= cut
            if not in_front:
                bound = cutlass.max(bound, key)
        place = take_place(ranking, SCRATCH_FRONT, in_front)
        if in_front:
            store_entry(own_front, place, key, position)
        kept = i < entries
        behind = i
        if lowest > 0:
            kept = i < entries and key >= lowest
            behind = take_place(ranking, SCRATCH_FRONT + 2, kept)
        if kept:
            store_entry(own_list, behind, key, position)
    bound = cute.arch.warp_redux_sync(bound, "umax")
    if thread % WARP_SIZE == 0:
        atomic_extreme(ranking.scratch.iterator + SCRATCH_FRONT + 1, bound, "max")
    consumer_sync(plan)
    for place in cutlass.range(
        ranking.scratch[SCRATCH_FRONT] + thread, front, plan.consumer_threads, unroll=1
    ):
        store_entry(own_front, place, Uint32(0), Uint32(NO_POSITION))
    if thread == 0:
        base.store(ranking.scratch[SCRATCH_FRONT + 2] if lowest > 0 else entries)
        (base + 1).store(ranking.scratch[SCRATCH_FRONT + 1])
        (base + 2).store(first_page * PAGE_SIZE)
        (base + 3).store(Int32(cut))
    consumer_sync(plan)
    if thread == 0:
        # The consumer sync ordered everyone's stores before this thread's release.
        before = cute.arch.atomic_add(
            workspace.arrivals.iterator + row, Int32(1), sem="acq_rel", scope="gpu"
        )
        is_last = before == share.parts - 1
        if is_last:
            (workspace.arrivals.iterator + row).store(Int32(0))
        ranking.scratch[SCRATCH_LAST] = Int32(1) if is_last else Int32(0)
    consumer_sync(plan)
    return ranking.scratch[SCRATCH_LAST] == 1


@cute.jit
def store_entry(base: Any, place: Int32, key: Uint32, position: Uint32) -> None:
    """One (key, position) of a published list."""
    at = base + 2 * place
    cute.arch.inline_ptx(
        "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[at, key, position]
    )


@cute.jit
def load_entry(base: Any, place: Int32) -> tuple[Uint32, Uint32]:
    """One (key, position) of a published list, past the first-level cache."""
    at = base + 2 * place
    return cute.arch.inline_ptx(
        "ld.global.cg.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Uint32, Uint32],
        read_only_args=[at],
    )


@cute.jit
def load_word(pointer: Any) -> Int32:
    """A word of a published header, past the first-level cache."""
    return cute.arch.inline_ptx(
        "ld.global.cg.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[pointer]
    )


class Header(NamedTuple):
    """What the consumer thread of a part's number knows of it."""

    entries: Int32  # of its list; 0 where there is no such part
    bound: Uint32  # the largest key that is not in the front
    first_position: Uint32  # where the part begins


@cute.jit
def load_header(
    workspace: Workspace, share: Share, thread: Int32, plan: cutlass.Constexpr
) -> Header:
    """The header of part `thread`. No branch: nothing waits for the loads here."""
    part = cutlass.min(thread, share.parts - 1)
    entries, bound, first_position, _ = load_two(
        slot_base(workspace, part_slot(share, part), plan), Int32(0)
    )
    return Header(Int32(entries) if thread < share.parts else Int32(0), bound, first_position)


@cute.jit
def load_two(base: Any, place: Int32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Two neighbouring entries, `place` even: key, position, key, position."""
    at = base + 2 * place
    return cute.arch.inline_ptx(
        "ld.global.cg.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32, Uint32, Uint32, Uint32],
        read_only_args=[at],
    )


class Fronts(NamedTuple):
    """What ranking the fronts gave."""

    entries: Int32  # of the list, unused ones of the fronts included
    used: Int32  # tokens among them
    found: cutlass.Boolean  # whether the threshold is known
    at_key: Uint32
    at_position: Uint32


@cute.jit
def load_fronts(
    ranking: Ranking,
    workspace: Workspace,
    share: Share,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Int32, Header]:
    """The list becomes all parts' fronts, padded to a multiple of 4: (entries, header).

    Scratch holds the extremes of the keys and the count of keys above 0. Unused entries have key
    0, like NaN scores. Synced.
    """
    fronts = row_fronts(workspace, share, plan)
    pairs = front_offset(share, share.parts, plan) // 2
    if thread < 3:
        ranking.scratch[SCRATCH_EXTREMES + thread] = Int32(-1) if thread == 0 else Int32(0)
        if thread < 2:  # what pads the list
            ranking.keys[2 * pairs + thread] = Int32(0)
            ranking.positions[2 * pairs + thread] = Int32(-1)
    clear_histogram(ranking, thread, plan)
    header = load_header(workspace, share, thread, plan)
    least, greatest, used = Uint32(0xFFFFFFFF), Uint32(0), Int32(0)
    stretch = PAIRS_TOGETHER * plan.consumer_threads
    for first in cutlass.range(thread, pairs, stretch, unroll=1):
        words = cute.make_rmem_tensor(4 * PAIRS_TOGETHER, Uint32)
        for i in cutlass.range_constexpr(PAIRS_TOGETHER):
            pair = cutlass.min(first + i * plan.consumer_threads, pairs - 1)
            words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = load_two(
                fronts, 2 * pair
            )
        for i in cutlass.range_constexpr(PAIRS_TOGETHER):
            pair = first + i * plan.consumer_threads
            if pair < pairs:
                key, next_key = words[4 * i], words[4 * i + 2]
                ranking.keys[2 * pair], ranking.keys[2 * pair + 1] = Int32(key), Int32(next_key)
                ranking.positions[2 * pair] = Int32(words[4 * i + 1])
                ranking.positions[2 * pair + 1] = Int32(words[4 * i + 3])
                # Less 1, the key 0 is the largest of all.
                least = cutlass.min(least, cutlass.min(key - 1, next_key - 1))
                greatest = cutlass.max(greatest, cutlass.max(key, next_key))
                used += Int32(1) if key > 0 else Int32(0)
                used += Int32(1) if next_key > 0 else Int32(0)
    least = cute.arch.warp_redux_sync(least, "umin")
    greatest = cute.arch.warp_redux_sync(greatest, "umax")
    used = cute.arch.warp_redux_sync(used, "add")
    consumer_sync(plan)
    if thread % WARP_SIZE == 0:
        atomic_extreme(ranking.scratch.iterator + SCRATCH_EXTREMES, least, "min")
        atomic_extreme(ranking.scratch.iterator + SCRATCH_EXTREMES + 1, greatest, "max")
        atomic_extreme(ranking.scratch.iterator + SCRATCH_EXTREMES + 2, Uint32(used), "add")
    consumer_sync(plan)
    return (2 * pairs + 3) // 4 * 4, header


@cute.jit
def score_of(key: Uint32) -> Float32:
    """The score that a key stands for (see `sortable`)."""
    bits = ~key
    if key >> 31 == 1:
        bits = key ^ Uint32(0x80000000)
    return bits.bitcast(Float32)


@cute.jit
def step_of(key: Uint32, lowest: Float32, scale: Float32) -> Int32:
    """The bin of a key between the extremes. Monotone: so are difference, product and rounding."""
    step = Int32((score_of(key) - lowest) * scale)
    return cutlass.min(cutlass.max(step, Int32(0)), Int32(NUM_BINS - 1))


@cute.jit
def rank_fronts(
    ranking: Ranking,
    workspace: Workspace,
    share: Share,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Header, Fronts]:
    """The list becomes all parts' fronts; nearly always their threshold is found on the way.

    The scores are counted in equal steps between their extremes, and the few of the cut-off step
    are compared. More than a few (a plateau, infinities), or NaN scores to choose from: `found` is
    False.
    """
    entries, header = load_fronts(ranking, workspace, share, thread, plan)
    least = Uint32(ranking.scratch[SCRATCH_EXTREMES]) + 1
    greatest = Uint32(ranking.scratch[SCRATCH_EXTREMES + 1])
    used = ranking.scratch[SCRATCH_EXTREMES + 2]
    at_key, at_position = Uint32(0), Uint32(LAST_POSITION)
    found = used > plan.topk
    if found:
        # Equal steps of the score, not of the key, which has half its values between -1 and 1.
        lowest = score_of(least)
        width = (score_of(greatest) - lowest) * (1.0 / (NUM_BINS - 1))
        scale = cute.arch.rcp_approx(width)
        if thread == 0:
            ranking.scratch[SCRATCH_CANDIDATES] = Int32(0)
        for i in cutlass.range(thread, entries // 4, plan.consumer_threads, unroll=1):
            keys = four_at(ranking.keys, i)
            for k in cutlass.range_constexpr(4):
                key = Uint32(keys[k])
                step = step_of(key, lowest, scale)
                # Unused entries count where nobody looks: behind the last bin, no branch.
                count_in_bin(ranking, step if key > 0 else Int32(NUM_BINS))
        consumer_sync(plan)
        chosen, above, within = find_bin(ranking, Int32(plan.topk), thread, plan)
        found = within <= plan.max_compared
        if found:
            # A first test that is one comparison: the keys of the step, its neighbours and 4 more
            # on both sides, which is more than rounding can move it.
            step = Float32(chosen)
            low = sortable(lowest + (step - 1.0) * width) - 4
            span = sortable(lowest + (step + 2.0) * width) + 4 - low
            for i in cutlass.range(thread, entries // 4, plan.consumer_threads, unroll=1):
                keys = four_at(ranking.keys, i)
                for k in cutlass.range_constexpr(4):
                    key = Uint32(keys[k])
                    if key - low <= span:
                        if step_of(key, lowest, scale) == chosen:
                            add_candidate(ranking, key, position_at(ranking, 4 * i + k))
            consumer_sync(plan)
            at_key, at_position = rank_candidates(ranking, within, plan.topk - above, thread, plan)
    if not found:
        used = count_used(ranking, entries, thread, plan)
    return header, Fronts(entries, used, found, at_key, at_position)


@cute.jit
def count_used(ranking: Ranking, entries: Int32, thread: Int32, plan: cutlass.Constexpr) -> Int32:
    """How many of the list's entries are tokens, those with NaN scores included."""
    used = Int32(0)
    for i in cutlass.range(thread, entries, plan.consumer_threads, unroll=1):
        if position_at(ranking, i) < NO_POSITION:
            used += 1
    _, total = consumer_prefix(ranking, used, thread, plan)
    consumer_sync(plan)
    return total


@cute.jit
def entries_that_may_win(
    header: Header, first_part: Int32, at_key: Uint32, at_position: Uint32, thread: Int32
) -> Int32:
    """Entries of the thread's part if it is `first_part` or later and its back can hold winners.

    Parts are in the order of positions: on a plateau the first ones settle it, and with the new
    threshold the others need not be read.
    """
    entries = Int32(0)
    may_tie = header.bound == at_key and header.first_position <= at_position
    if thread >= first_part and (header.bound > at_key or may_tie):
        entries = header.entries
    return entries


@cute.jit
def any_may_win(
    header: Header,
    first_part: Int32,
    at_key: Uint32,
    at_position: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> cutlass.Boolean:
    """Whether any back must be read; all consumers call."""
    mine = entries_that_may_win(header, first_part, at_key, at_position, thread) > 0
    return prims.barrier_cta_red_aligned(
        mine, VOTE_BARRIER, "or", thread_count=plan.consumer_threads
    )


@cute.jit
def list_backs(
    ranking: Ranking,
    header: Header,
    first_part: Int32,
    room: Int32,
    at_key: Uint32,
    at_position: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> Int32:
    """Choose parts from `first_part` on whose backs can hold winners, as far as the list has room.

    Writes part_entries, 0 for parts not to read. Returns the part before which the choice ended.
    """
    needed = entries_that_may_win(header, first_part, at_key, at_position, thread)
    before, total = consumer_prefix(ranking, needed, thread, plan)
    fits = before + needed <= room
    if not fits:
        needed = Int32(0)
    ranking.part_entries[thread] = needed
    if thread == 0:
        ranking.scratch[SCRATCH_PARTS] = Int32(plan.consumer_threads)
    consumer_sync(plan)
    if total > room:
        unfit = Int32(thread) if not fits else Int32(plan.consumer_threads)
        atomic_extreme(ranking.scratch.iterator + SCRATCH_PARTS, Uint32(unfit), "min")
    consumer_sync(plan)
    return ranking.scratch[SCRATCH_PARTS]


@cute.jit
def gather_backs(
    ranking: Ranking,
    workspace: Workspace,
    share: Share,
    at_key: Uint32,
    at_position: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> Int32:
    """Append the chosen backs' entries that can win, a warp a part; returns the list's length."""
    lane = thread % WARP_SIZE
    # Entries at or above a part's cut are in its front, and in the list already.
    for part in cutlass.range(thread // WARP_SIZE, share.parts, plan.consumer_warps, unroll=1):
        count = ranking.part_entries[part]
        base = slot_base(workspace, part_slot(share, part), plan)
        cut = Uint32(0)
        if count > 0:
            cut = Uint32(load_word(base + 3))
        for first in cutlass.range(lane, count + lane, LOADED_TOGETHER * WARP_SIZE, unroll=1):
            keys = cute.make_rmem_tensor(LOADED_TOGETHER, Uint32)
            positions = cute.make_rmem_tensor(LOADED_TOGETHER, Uint32)
            for i in cutlass.range_constexpr(LOADED_TOGETHER):
                index = cutlass.min(first + i * WARP_SIZE, count - 1)
                keys[i], positions[i] = load_entry(base + plan.first_list_word, index)
            for i in cutlass.range_constexpr(LOADED_TOGETHER):
                wanted = (
                    first + i * WARP_SIZE < count
                    and keys[i] < cut
                    and accepts(keys[i], positions[i], at_key, at_position)
                )
                append(ranking, keys[i], positions[i], wanted)
    consumer_sync(plan)
    entries = ranking.scratch[SCRATCH_COUNT]
    consumer_sync(plan)
    return entries
