"""The k-th best of a row, or of one CTA's part of it; exact, however many keys tie.

An entry is (key, position); of equal keys the smaller position is better. The *threshold* is the
last winner: every entry that is at least as good is accepted. It is found in rounds, each of which
narrows a range of keys to one of its 4096 bins. All CTAs get the entries when few are left, and
each compares them itself. The CTAs' counts say how many of its own each accepts when a single key
is left that many entries have: smaller parts of the row have the smaller positions.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32, const_expr, cute

from flashdsa.dsl.pipeline import PackedPhases
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import Selecting, consumer_sync
from flashdsa.kernels.indexer.select.candidates import Bin, Candidate, close_rounds, compare, gather
from flashdsa.kernels.indexer.select.exchange import (
    COUNTED,
    GATHERED,
    above_before,
    find_kth,
    own_above,
    within_before,
)
from flashdsa.kernels.indexer.select.keys import (
    Part,
    Range,
    Steps,
    cut_to_part,
    highest_key,
    inside,
    lowest_key,
    narrowed,
    steps_of,
)
from flashdsa.kernels.indexer.select.lists import clear_histogram, count_in_bin, key_at, position_at
from flashdsa.kernels.indexer.sizes import LAST_POSITION
from flashdsa.kernels.indexer.smem_views import (
    SCRATCH_BEFORE,
    SCRATCH_CANDIDATES,
    SCRATCH_RECOUNTED,
    SelectBuffers,
)

LISTED, HELD, FOUND = range(3)
"""States of the search: entries are in the lists; a candidate in each thread's registers; done."""


class Threshold(NamedTuple):
    """The last accepted entry, and the numbers for the output that follow from it."""

    key: Uint32
    position: Uint32
    first_out_index: Int32  # accepted entries of the CTAs before this one
    total: Int32  # entries to choose from, of all CTAs


@cute.jit
def count_entry(
    select: SelectBuffers, range_: Range, steps: Steps, key: Uint32, position: Uint32
) -> None:
    """Count an entry in its bin, if it is in the range."""
    if inside(range_, key, ~position):
        value = ~position if steps.by_position else key
        count_in_bin(select, Int32((value - steps.base) >> Uint32(steps.shift)))


@cute.jit
def recount(s: Selecting, range_: Range, steps: Steps, listed: Int32, candidate: Candidate) -> None:
    """Count the range's entries into the histogram: of the first `listed` of the list, and of the
    candidates in registers. Synced."""
    select, thread, plan = s.select, s.thread, s.plan
    consumer_sync(plan)  # everyone has read what the round before counted
    if const_expr(plan.pairs):
        if thread == 0:
            select.scratch[SCRATCH_RECOUNTED] = Int32(1)
    clear_histogram(s)
    consumer_sync(plan)
    for i in cutlass.range(thread, listed, plan.consumer_threads, unroll=1):
        count_entry(select, range_, steps, key_at(select, i), position_at(select, i))
    if thread < candidate.count:
        count_entry(select, range_, steps, candidate.key, candidate.position)
    consumer_sync(plan)


@cute.jit
def find_threshold(
    s: Selecting, shared: cutlass.Boolean, to_bin: cutlass.Boolean, part: Part, phases: PackedPhases
) -> tuple[Threshold, PackedPhases]:
    """Find the `topk`-th best among the lists of all CTAs, or of the caller if not `shared`. Ends
    synced.

    All entries are accepted if they are `topk` or fewer. The histogram holds the bins of the list's
    entries; it is destroyed. A worse entry is enough if `to_bin`: at most max_candidates more
    entries are accepted then, and `first_out_index` means nothing. Returns the events' phases, too.
    """
    select, cluster, thread, plan = s.select, s.cluster, s.thread, s.plan
    range_ = Range(Uint32(0), Uint32(0xFFFFFFFF), ~Uint32(LAST_POSITION), Uint32(0xFFFFFFFF))
    if not shared:
        range_ = cut_to_part(range_, part)
    left = Int32(plan.topk)  # the k among the entries in the range
    counted = cutlass.Boolean(True)
    first_out_index, total = Int32(0), Int32(0)
    candidate = Candidate(Uint32(0), Uint32(0), Int32(0))
    # `above` is the second warp's: the caller's entries above the range.
    above, state = Int32(0), Int32(LISTED)
    at_key, at_position = Uint32(0), Uint32(LAST_POSITION)
    if thread == 0:
        select.scratch[SCRATCH_BEFORE] = Int32(0)
        select.scratch[SCRATCH_CANDIDATES] = Int32(0)
        if const_expr(plan.pairs):
            select.scratch[SCRATCH_RECOUNTED] = Int32(0)
    while state != FOUND:
        steps = steps_of(range_)
        if not counted:
            listed = part.entries if state == LISTED else Int32(0)
            recount(s, range_, steps, listed, candidate)
        found = find_kth(s, shared, left, phases.phase(COUNTED))
        if shared:
            phases = phases.passed(COUNTED)
        lane = thread % WARP_SIZE
        bin_ = Bin(
            found.within, within_before(s, shared, found.bin, lane), select.histogram[found.bin]
        )
        if shared and thread // WARP_SIZE == 1:
            above += own_above(s, found.bin, lane)
        left -= found.above
        was_shared = shared
        if counted:
            total = found.total
            range_ = range_._replace(low=lowest_key(found.bin), high=highest_key(found.bin))
            if total <= plan.topk:
                state = Int32(FOUND)
                first_out_index += bin_.before
                shared = cutlass.Boolean(False)
        else:
            range_ = narrowed(range_, steps, found.bin)
        counted = cutlass.Boolean(False)
        gathers = state == LISTED and found.within <= plan.max_candidates
        if to_bin and gathers and not steps.by_position:
            at_key = range_.low
            state = Int32(FOUND)
            gathers = cutlass.Boolean(False)
            was_shared = cutlass.Boolean(False)
        if state == LISTED and shared and not gathers and range_.low == range_.high:
            # One key: the CTAs before accept their entries first, the caller the rest.
            first_out_index += cutlass.min(bin_.before, left)
            left = cutlass.max(left - bin_.before, Int32(0))
            at_key = range_.low
            if left >= bin_.own:
                state = Int32(FOUND)
            elif left == 0:
                at_key += 1
                state = Int32(FOUND)
            shared = cutlass.Boolean(False)
            range_ = cut_to_part(range_, part)
        if gathers or (was_shared and not shared):
            if was_shared:
                close_rounds(s, found.within if gathers else Int32(0), above)
            if gathers:
                candidate = gather(s, was_shared, part, range_, bin_, phases.phase(GATHERED))
                state = Int32(HELD)
                shared = cutlass.Boolean(False)
            elif was_shared:
                # received_full, the row's phase: every CTA's count above the bin has come
                # (st.async).
                cluster.received_full.wait(phases.phase(GATHERED))
            if was_shared:
                first_out_index += above_before(s, lane)
                phases = phases.passed(GATHERED)
        if state == HELD and found.within <= plan.max_compared:
            at_key, at_position, before = compare(
                s, range_, candidate, found.within, left, Uint32(part.first)
            )
            first_out_index += before
            state = Int32(FOUND)
    consumer_sync(plan)
    return Threshold(at_key, at_position, first_out_index, total), phases
