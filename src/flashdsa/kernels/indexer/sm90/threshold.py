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

from flashdsa.dsl.pipeline import PackedPhases
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.bins import (
    LAST_POSITION,
    highest_key,
    lowest_key,
)
from flashdsa.kernels.indexer.sm90.candidates import Bin, Held, close_rounds, compare, gather
from flashdsa.kernels.indexer.sm90.exchange import (
    COUNTED,
    GATHERED,
    above_before,
    find_rank,
    own_above,
    within_before,
)
from flashdsa.kernels.indexer.sm90.listing import (
    clear_histogram,
    consumer_sync,
    count_in_bin,
    key_at,
    position_at,
)
from flashdsa.kernels.indexer.sm90.memory import (
    SCRATCH_BEFORE,
    SCRATCH_CANDIDATES,
    Mailboxes,
    Ranking,
)
from flashdsa.kernels.indexer.sm90.place import Place
from flashdsa.kernels.indexer.sm90.ranges import (
    Part,
    Range,
    Steps,
    inside,
    narrowed,
    places_of,
    steps_of,
)

LISTED, HELD, FOUND = range(3)
"""Where the entries to choose from are: in the lists, one in each thread's registers; or done."""


class Threshold(NamedTuple):
    """The last accepted entry, and what follows for the output."""

    key: Uint32
    position: Uint32
    first_place: Int32  # accepted entries of the CTAs before this one
    total: Int32  # entries to choose from, of all CTAs


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
def find_threshold(
    ranking: Ranking,
    mail: Mailboxes,
    place: Place,
    shared: cutlass.Boolean,
    to_bin: cutlass.Boolean,
    part: Part,
    phases: PackedPhases,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Threshold, PackedPhases]:
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
        found = find_rank(ranking, mail, place, shared, left, phases.phase(COUNTED), thread, plan)
        if shared:
            phases = phases.passed(COUNTED)
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
                    phases.phase(GATHERED),
                    thread,
                    plan,
                )
                stage = Int32(HELD)
                shared = cutlass.Boolean(False)
            elif was_shared:
                mail.received_full.wait(phases.phase(GATHERED))
            if was_shared:
                first_place += above_before(mail, place, lane)
                phases = phases.passed(GATHERED)
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
    return Threshold(at_key, at_position, first_place, total), phases
