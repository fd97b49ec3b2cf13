"""The last entries that a threshold may be: taken out of the lists, gathered, and compared.

A CTA that shares a row sends its own to all, and gets theirs.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.dsl.cluster import send
from flashdsa.dsl.smem import load4
from flashdsa.dsl.warp import neighbours_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.exchange import send_above
from flashdsa.kernels.indexer.sm90.listing import consumer_sync, position_at
from flashdsa.kernels.indexer.sm90.memory import (
    SCRATCH_BEFORE,
    SCRATCH_CANDIDATES,
    SCRATCH_THRESHOLD,
    Mailboxes,
    Ranking,
)
from flashdsa.kernels.indexer.sm90.place import Place
from flashdsa.kernels.indexer.sm90.plan import ENTRY_WORDS
from flashdsa.kernels.indexer.sm90.ranges import Part, Range, inside

ENTRY_BYTES = 4 * ENTRY_WORDS


class Held(NamedTuple):
    """The caller's one of the entries that threads hold in registers, those of the first ones."""

    key: Uint32
    position: Uint32
    entries: Int32  # of all threads


@cute.jit
def entry_at(entries: cute.Tensor, index: Int32) -> tuple[Uint32, Uint32]:
    """Key and position of a candidate."""
    pointer = (entries.iterator + index * ENTRY_WORDS).align(ENTRY_BYTES)
    words = cute.make_tensor(pointer, cute.make_layout(ENTRY_WORDS)).load()
    return Uint32(words[0]), Uint32(words[1])


@cute.jit
def set_entry(entries: cute.Tensor, index: Int32, key: Uint32, position: Uint32) -> None:
    """Write a candidate."""
    entries[index * ENTRY_WORDS] = Int32(key)
    entries[index * ENTRY_WORDS + 1] = Int32(position)


@cute.jit
def add_entry(ranking: Ranking, entries: cute.Tensor, key: Uint32, position: Uint32) -> None:
    """Put an entry to the candidates; there is room."""
    index = cute.arch.atomic_add(
        ranking.scratch.iterator + SCRATCH_CANDIDATES, Int32(1), sem="relaxed", scope="cta"
    )
    set_entry(entries, index, key, position)


class Bin(NamedTuple):
    """The last round's bin: its entries."""

    within: Int32  # of all CTAs
    before: Int32  # of the CTAs before the caller
    own: Int32


@cute.jit
def close_rounds(
    mail: Mailboxes, place: Place, entries: Int32, above: Int32, thread: Int32
) -> None:
    """The row's last message: how many `entries` of a CTA come, and its count `above` the bin.

    `above` is the second warp's.
    """
    if thread == 0:
        expected = entries * ENTRY_BYTES + place.parts * 4
        mail.received_full.arrive_and_expect_tx(expected)
    if thread // WARP_SIZE == 1:
        send_above(mail, place, above, thread % WARP_SIZE)


@cute.jit
def gather(
    ranking: Ranking,
    mail: Mailboxes,
    place: Place,
    shared: cutlass.Boolean,
    part: Part,
    range_: Range,
    bin_: Bin,
    phase: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> Held:
    """All entries in the range, of every CTA if `shared`, at most one a thread.

    They are in `received` too, until something else is put there. SCRATCH_CANDIDATES is 0, before
    and behind the next sync.
    """
    for i in cutlass.range(thread, (part.entries + 3) // 4, plan.consumer_threads, unroll=1):
        keys = load4(ranking.keys, i)
        for k in cutlass.range_constexpr(4):
            key = Uint32(keys[k])
            # Below the range is far above it, unsigned.
            if key - range_.low <= range_.high - range_.low and 4 * i + k < part.entries:
                position = position_at(ranking, 4 * i + k)
                if ~position >= range_.place_low and ~position <= range_.place_high:
                    add_entry(ranking, ranking.candidates, key, position)
    consumer_sync(plan)
    key, position = Uint32(0), Uint32(0)
    if shared:
        for i in cutlass.range(thread, bin_.own * place.parts, plan.consumer_threads, unroll=1):
            own = i // place.parts
            box = mail.received.iterator + (bin_.before + own) * ENTRY_WORDS
            entry = [ranking.candidates[own * ENTRY_WORDS + word] for word in range(ENTRY_WORDS)]
            peer = place.first + (i - own * place.parts)
            send(box.align(ENTRY_BYTES), entry, mail.received_full.at(), peer)
        # received_full: the candidates of every CTA are there.
        mail.received_full.wait(phase)
        if thread < bin_.within:
            key, position = entry_at(mail.received, thread)
    else:
        if thread < bin_.within:
            key, position = entry_at(ranking.candidates, thread)
            set_entry(mail.received, thread, key, position)
        consumer_sync(plan)
    if thread == 0:
        ranking.scratch[SCRATCH_CANDIDATES] = Int32(0)
    return Held(key, position, bin_.within)


@cute.jit
def compare(
    ranking: Ranking,
    mail: Mailboxes,
    range_: Range,
    held: Held,
    count: Int32,
    rank: Int32,
    first_position: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Uint32, Uint32, Int32]:
    """The entry of `rank` among the `count` of the `held` ones that are in the range, at most
    max_compared: each is compared with each. With it, how many of the held ones are as good and
    before `first_position`. SCRATCH_BEFORE and SCRATCH_CANDIDATES were 0. Synced.

    All held ones are in `received`, unless a round behind `gather` left some out.
    """
    better_than_range = cutlass.Boolean(False)
    if count != held.entries:
        if thread < held.entries:
            place = ~held.position
            if inside(range_, held.key, place):
                add_entry(ranking, mail.received, held.key, held.position)
            else:
                better_than_range = held.key > range_.high or (
                    held.key == range_.high and place > range_.place_high
                )
        consumer_sync(plan)
    lanes_each = plan.consumer_threads // plan.max_compared
    index = thread // lanes_each
    mine, mine_at = Uint32(0), Uint32(0)
    if index < count:
        mine, mine_at = entry_at(mail.received, index)
    better = Int32(0)
    for other in cutlass.range(thread % lanes_each, count, lanes_each, unroll=4):
        other_key, other_at = entry_at(mail.received, other)
        if other_key > mine or (other_key == mine and other_at < mine_at):
            better += 1
    better = neighbours_sum(better, lanes_each)
    wins = index < count and better < rank and thread % lanes_each == 0
    if wins and better == rank - 1:
        ranking.scratch[SCRATCH_THRESHOLD] = Int32(mine)
        ranking.scratch[SCRATCH_THRESHOLD + 1] = Int32(mine_at)
    counted = wins and mine_at < first_position
    left_out = better_than_range and held.position < first_position
    before = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(counted)))
    before += Int32(cute.arch.popc(cute.arch.vote_ballot_sync(left_out)))
    if before != 0 and thread % WARP_SIZE == 0:
        cute.arch.atomic_add(
            ranking.scratch.iterator + SCRATCH_BEFORE, before, sem="relaxed", scope="cta"
        )
    consumer_sync(plan)
    return (
        Uint32(ranking.scratch[SCRATCH_THRESHOLD]),
        Uint32(ranking.scratch[SCRATCH_THRESHOLD + 1]),
        ranking.scratch[SCRATCH_BEFORE],
    )
