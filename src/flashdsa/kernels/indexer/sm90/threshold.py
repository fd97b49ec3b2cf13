"""The k-th best of a row, or of one CTA's part of it; exact, however many keys tie.

An entry is (key, position); of equal keys the smaller position is better. A *threshold* is the
last entry that is in: everything that is at least as good is accepted. It is found in rounds, each
of which narrows a range of keys to one of 4096 bins of it. When few entries are left all CTAs get
them, and each compares them itself. When one key is left that many entries have, the CTAs' counts
say how many of its own each accepts: smaller parts of the row have the smaller positions.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.kernels.indexer.sm90.bins import (
    LAST_POSITION,
    highest_key,
    lowest_key,
    step_bits,
)
from flashdsa.kernels.indexer.sm90.exchange import (
    COUNTED,
    GATHERED,
    above_before,
    find_rank,
    own_above,
    parity_of,
    send_above,
    send_entry,
    within_before,
)
from flashdsa.kernels.indexer.sm90.listing import (
    clear_histogram,
    consumer_sync,
    count_in_bin,
    four_at,
    key_at,
    position_at,
)
from flashdsa.kernels.indexer.sm90.memory import (
    SCRATCH_BEFORE,
    SCRATCH_CANDIDATES,
    SCRATCH_THRESHOLD,
    Mailboxes,
    Ranking,
)
from flashdsa.kernels.indexer.sm90.place import Place
from flashdsa.kernels.indexer.sm90.plan import ENTRY_WORDS, WARP_SIZE

LISTED, HELD, FOUND = range(3)
"""Where the entries to choose from are: in the lists, one in each thread's registers; or done."""
ENTRY_BYTES = 4 * ENTRY_WORDS


class Part(NamedTuple):
    """The caller's part of a row, as positions, and what it has listed of it."""

    first: Int32
    end: Int32
    entries: Int32


class Threshold(NamedTuple):
    """The last accepted entry, and what follows for the output."""

    key: Uint32
    position: Uint32
    first_place: Int32  # accepted entries of the CTAs before this one
    total: Int32  # entries to choose from, of all CTAs


class Range(NamedTuple):
    """Entries that may be the threshold: keys and places, both ends included.

    A place is an inverted position, so that a larger one is better, as with keys.
    """

    low: Uint32
    high: Uint32
    place_low: Uint32
    place_high: Uint32


@cute.jit
def inside(range_: Range, key: Uint32, place: Uint32) -> cutlass.Boolean:
    """Whether an entry is in the range."""
    return (
        key >= range_.low
        and key <= range_.high
        and place >= range_.place_low
        and place <= range_.place_high
    )


class Held(NamedTuple):
    """The caller's one of the entries that threads hold in registers, those of the first ones."""

    key: Uint32
    position: Uint32
    entries: Int32  # of all threads


def places_of(range_: Range, part: Part) -> Range:
    """The range, cut to the part's positions."""
    return Range(range_.low, range_.high, ~Uint32(part.end - 1), ~Uint32(part.first))


class Steps(NamedTuple):
    """How a range is cut into bins: keys first, places when one key is left."""

    by_place: cutlass.Boolean
    base: Uint32
    top: Uint32
    shift: Int32


@cute.jit
def steps_of(range_: Range) -> Steps:
    """Up to 4096 equal steps of the range."""
    by_place = range_.low == range_.high
    base = range_.place_low if by_place else range_.low
    top = range_.place_high if by_place else range_.high
    return Steps(by_place, base, top, step_bits(top - base))


@cute.jit
def narrowed(range_: Range, steps: Steps, chosen: Int32) -> Range:
    """One step of the range."""
    low = steps.base + (Uint32(chosen) << Uint32(steps.shift))
    # Not min(low + step, top): that sum wraps around in the last bin below 2**32.
    high = low + cutlass.min((Uint32(1) << Uint32(steps.shift)) - 1, steps.top - low)
    return Range(
        low=range_.low if steps.by_place else low,
        high=range_.high if steps.by_place else high,
        place_low=low if steps.by_place else range_.place_low,
        place_high=high if steps.by_place else range_.place_high,
    )


@cute.jit
def count_entry(
    ranking: Ranking, range_: Range, steps: Steps, key: Uint32, position: Uint32
) -> None:
    """Into its bin, if it is in the range."""
    if inside(range_, key, ~position):
        value = ~position if steps.by_place else key
        count_in_bin(ranking, Int32((value - steps.base) >> Uint32(steps.shift)))


@cute.jit
def recount(
    ranking: Ranking,
    range_: Range,
    steps: Steps,
    listed: Int32,
    held: Held,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """The histogram of the range's entries: of the first `listed` of the list, and of those that
    threads hold. Synced."""
    consumer_sync(plan)  # everyone has read what the round before counted
    clear_histogram(ranking, thread, plan)
    consumer_sync(plan)
    for i in cutlass.range(thread, listed, plan.consumer_threads, unroll=1):
        count_entry(ranking, range_, steps, key_at(ranking, i), position_at(ranking, i))
    if thread < held.entries:
        count_entry(ranking, range_, steps, held.key, held.position)
    consumer_sync(plan)


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
        cute.arch.mbarrier_arrive_and_expect_tx(mail.received_full, expected)
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
    parity: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> Held:
    """All entries in the range, of every CTA if `shared`, at most one a thread.

    They are in `received` too, until something else is put there. SCRATCH_CANDIDATES is 0, before
    and behind the next sync.
    """
    for i in cutlass.range(thread, (part.entries + 3) // 4, plan.consumer_threads, unroll=1):
        keys = four_at(ranking.keys, i)
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
            send_entry(
                box.align(ENTRY_BYTES),
                ranking.candidates[own * ENTRY_WORDS],
                ranking.candidates[own * ENTRY_WORDS + 1],
                mail.received_full,
                place.first + (i - own * place.parts),
            )
        # received_full: the candidates of every CTA are there.
        cute.arch.mbarrier_wait(mail.received_full, parity)
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
    for step in cutlass.range_constexpr(lanes_each.bit_length() - 1):
        better += cute.arch.shuffle_sync_bfly(better, 1 << step)
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


@cute.jit
def find_threshold(
    ranking: Ranking,
    mail: Mailboxes,
    place: Place,
    shared: cutlass.Boolean,
    to_bin: cutlass.Boolean,
    part: Part,
    parities: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Threshold, Int32]:
    """The entry of rank `topk` among the lists of all CTAs, or of the caller if not `shared`.

    If `to_bin`, a worse one will do: at most max_candidates more entries are accepted then, and
    `first_place` means nothing. The histogram holds the bins of the list's entries; it is
    destroyed. With `topk` entries or fewer all of them are accepted. Ends synced.
    """
    range_ = Range(Uint32(0), Uint32(0xFFFFFFFF), ~Uint32(LAST_POSITION), Uint32(0xFFFFFFFF))
    if not shared:
        range_ = places_of(range_, part)
    left = Int32(plan.topk)  # the rank among the entries in the range
    counted = cutlass.Boolean(True)
    first_place, total = Int32(0), Int32(0)
    held = Held(Uint32(0), Uint32(0), Int32(0))
    # `above` is the second warp's: the caller's entries above the range.
    above, stage = Int32(0), Int32(LISTED)
    at_key, at_position = Uint32(0), Uint32(LAST_POSITION)
    if thread == 0:
        ranking.scratch[SCRATCH_BEFORE] = Int32(0)
        ranking.scratch[SCRATCH_CANDIDATES] = Int32(0)
    while stage != FOUND:
        steps = steps_of(range_)
        if not counted:
            listed = part.entries if stage == LISTED else Int32(0)
            recount(ranking, range_, steps, listed, held, thread, plan)
        found = find_rank(
            ranking, mail, place, shared, left, parity_of(parities, COUNTED), thread, plan
        )
        if shared:
            parities = parities ^ COUNTED
        lane = thread % WARP_SIZE
        bin_ = Bin(
            found.within,
            within_before(mail, place, shared, found.bin, lane),
            ranking.histogram[found.bin],
        )
        if shared and thread // WARP_SIZE == 1:
            above += own_above(ranking, mail, found.bin, lane)
        left -= found.above
        was_shared = shared
        if counted:
            total = found.total
            range_ = range_._replace(low=lowest_key(found.bin), high=highest_key(found.bin))
            if total <= plan.topk:
                stage = Int32(FOUND)
                first_place += bin_.before
                shared = cutlass.Boolean(False)
        else:
            range_ = narrowed(range_, steps, found.bin)
        counted = cutlass.Boolean(False)
        gathers = stage == LISTED and found.within <= plan.max_candidates
        if to_bin and gathers and not steps.by_place:
            at_key = range_.low
            stage = Int32(FOUND)
            gathers = cutlass.Boolean(False)
            was_shared = cutlass.Boolean(False)
        if stage == LISTED and shared and not gathers and range_.low == range_.high:
            # One key: the CTAs before accept theirs first, the caller what is left.
            first_place += cutlass.min(bin_.before, left)
            left = cutlass.max(left - bin_.before, Int32(0))
            at_key = range_.low
            if left >= bin_.own:
                stage = Int32(FOUND)
            elif left == 0:
                at_key += 1
                stage = Int32(FOUND)
            shared = cutlass.Boolean(False)
            range_ = places_of(range_, part)
        if gathers or (was_shared and not shared):
            if was_shared:
                close_rounds(mail, place, found.within if gathers else Int32(0), above, thread)
            if gathers:
                held = gather(
                    ranking,
                    mail,
                    place,
                    was_shared,
                    part,
                    range_,
                    bin_,
                    parity_of(parities, GATHERED),
                    thread,
                    plan,
                )
                stage = Int32(HELD)
                shared = cutlass.Boolean(False)
            elif was_shared:
                cute.arch.mbarrier_wait(mail.received_full, parity_of(parities, GATHERED))
            if was_shared:
                first_place += above_before(mail, place, lane)
                parities = parities ^ GATHERED
        if stage == HELD and found.within <= plan.max_compared:
            at_key, at_position, before = compare(
                ranking,
                mail,
                range_,
                held,
                found.within,
                left,
                Uint32(part.first),
                thread,
                plan,
            )
            first_place += before
            stage = Int32(FOUND)
    consumer_sync(plan)
    return Threshold(at_key, at_position, first_place, total), parities
