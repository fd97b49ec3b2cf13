"""The k-th best of a row, or of one CTA's part of it; exact, however many keys tie.

An entry is (key, position); of equal keys the smaller position is better. The *threshold* is the
last winner: every entry that is at least as good is accepted. It is found in rounds, each of which
narrows a range of keys to one of its 4096 bins. All CTAs get the entries when few are left, and
each compares them itself. The CTAs' counts say how many of its own each accepts when a single key
is left that many entries have: smaller parts of the row have the smaller positions.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint32, const_expr, cute

from flashdsa.dsl import pipeline, smem
from flashdsa.dsl.cluster import send
from flashdsa.dsl.warp import neighbours_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.select import exchange, lists
from flashdsa.kernels.indexer.select.sort_keys import (
    Part,
    Range,
    Steps,
    between,
    cut_to_part,
    highest_key,
    inside,
    lowest_key,
    narrowed,
    signed,
    steps_of,
    unsigned,
)
from flashdsa.kernels.indexer.sizes import ENTRY_WORDS, LAST_POSITION
from flashdsa.kernels.indexer.smem_views import Scratch, SelectBuffers, Selecting, consumer_sync

ENTRY_BYTES = 4 * ENTRY_WORDS


class Candidate(NamedTuple):
    """One of the gathered entries, in the registers of a thread: the first `count` threads have one
    each."""

    key: Uint32
    position: Uint32
    count: Int32  # of all threads


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
def add_entry(select: SelectBuffers, entries: cute.Tensor, key: Uint32, position: Uint32) -> None:
    """Append an entry to the candidates, which have room."""
    index = cute.arch.atomic_add(
        select.scratch.iterator + Scratch.CANDIDATES, Int32(1), sem="relaxed", scope="cta"
    )
    set_entry(entries, index, key, position)


class Bin(NamedTuple):
    """Number of entries in the last round's bin."""

    within: Int32  # of all CTAs
    before: Int32  # of the CTAs before the caller
    own: Int32  # of the caller


@cute.jit
def close_rounds(s: Selecting, entries: Int32, above: Int32) -> None:
    """Announce the bytes to come at received_full, and send the caller's count above the bin to
    all. entries: candidates that come, of all CTAs. above: the second warp's."""
    cluster, coord, thread = s.cluster, s.coord, s.thread
    if thread == 0:
        # received_full: its phase ends with this arrival and the last of these bytes, which may
        # come before it.
        expected = entries * ENTRY_BYTES + coord.num_parts * 4
        cluster.received_full.arrive_and_expect_tx(expected)
    if thread // WARP_SIZE == 1:
        exchange.send_above(s, above, thread % WARP_SIZE)


@cute.jit
def gather(
    s: Selecting, shared: cutlass.Boolean, part: Part, range_: Range, bin_: Bin, phase: Int32
) -> Candidate:
    """All entries in the range, of every CTA if `shared`, at most one a thread. They are in
    `received`, too, until it is overwritten. Scratch.CANDIDATES is 0 before, and again after the
    next sync."""
    select, cluster, coord, thread, plan = s.select, s.cluster, s.coord, s.thread, s.plan
    width = range_.high - range_.low
    for i in cutlass.range(thread, (part.entries + 3) // 4, plan.consumer_threads, unroll=1):
        keys = smem.load4(select.keys, i)
        for k in cutlass.range_constexpr(4):
            key = Uint32(keys[k])
            if between(key, range_.low, width) and 4 * i + k < part.entries:
                position = lists.position_at(select, 4 * i + k)
                if ~position >= range_.inv_low and ~position <= range_.inv_high:
                    add_entry(select, select.candidates, key, position)
    # All consumers: the caller's candidates are complete.
    consumer_sync(plan)
    key, position = Uint32(0), Uint32(0)
    if shared:
        for i in cutlass.range(thread, bin_.own * coord.num_parts, plan.consumer_threads, unroll=1):
            own = i // coord.num_parts
            dst = cluster.received.iterator + (bin_.before + own) * ENTRY_WORDS
            entry = [select.candidates[own * ENTRY_WORDS + word] for word in range(ENTRY_WORDS)]
            peer = coord.first_rank + (i - own * coord.num_parts)
            send(dst.align(ENTRY_BYTES), entry, cluster.received_full.at(), peer)
        # received_full, the row's phase: every CTA's candidates and counts have come (st.async).
        # They may be read until this CTA sends its `coarse` counts of the next row or round.
        cluster.received_full.wait(phase)
        if thread < bin_.within:
            key, position = entry_at(cluster.received, thread)
    else:
        if thread < bin_.within:
            key, position = entry_at(select.candidates, thread)
            set_entry(cluster.received, thread, key, position)
        consumer_sync(plan)
    if thread == 0:
        select.scratch[Scratch.CANDIDATES] = Int32(0)
    return Candidate(key, position, bin_.within)


@cute.jit
def compare(
    s: Selecting,
    range_: Range,
    candidate: Candidate,
    count: Int32,
    k: Int32,
    first_position: Uint32,
) -> tuple[Uint32, Uint32, Int32]:
    """Find the `k`-th best of the `count` candidates in the range, at most max_compared: each is
    compared with each. Synced.

    All candidates are in `received`, unless a round after `gather` left some out of the range.
    Scratch.BEFORE and Scratch.CANDIDATES were 0.

    Returns:
        Its key and position, and how many of all candidates are as good and before
        `first_position`.
    """
    select, cluster, thread, plan = s.select, s.cluster, s.thread, s.plan
    better_than_range = cutlass.Boolean(False)
    if count != candidate.count:
        if thread < candidate.count:
            inv_position = ~candidate.position
            if inside(range_, candidate.key, inv_position):
                add_entry(select, cluster.received, candidate.key, candidate.position)
            else:
                better_than_range = candidate.key > range_.high or (
                    candidate.key == range_.high and inv_position > range_.inv_high
                )
        # All consumers: the candidates in the range are in `received`.
        consumer_sync(plan)
    lanes_each = plan.consumer_threads // plan.lists.max_compared
    index = thread // lanes_each
    mine, mine_at = Uint32(0), Uint32(0)
    if index < count:
        mine, mine_at = entry_at(cluster.received, index)
    better = Int32(0)
    for other in cutlass.range(thread % lanes_each, count, lanes_each, unroll=4):
        other_key, other_at = entry_at(cluster.received, other)
        if other_key > mine or (other_key == mine and other_at < mine_at):
            better += 1
    better = neighbours_sum(better, lanes_each)
    wins = index < count and better < k and thread % lanes_each == 0
    if wins and better == k - 1:
        select.scratch[Scratch.THRESHOLD] = Int32(mine)
        select.scratch[Scratch.THRESHOLD + 1] = Int32(mine_at)
    counted = wins and mine_at < first_position
    left_out = better_than_range and candidate.position < first_position
    before = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(counted)))
    before += Int32(cute.arch.popc(cute.arch.vote_ballot_sync(left_out)))
    if before != 0 and thread % WARP_SIZE == 0:
        cute.arch.atomic_add(
            select.scratch.iterator + Scratch.BEFORE, before, sem="relaxed", scope="cta"
        )
    # All consumers: the threshold and the count before the part are in scratch.
    consumer_sync(plan)
    return (
        Uint32(select.scratch[Scratch.THRESHOLD]),
        Uint32(select.scratch[Scratch.THRESHOLD + 1]),
        select.scratch[Scratch.BEFORE],
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
        lists.count_in_bin(select, Int32((value - steps.base) >> Uint32(steps.shift)))


@cute.jit
def recount(s: Selecting, range_: Range, steps: Steps, part: Part, candidate: Candidate) -> None:
    """Count the range's entries into the histogram: of the part's list, and of the candidates in
    registers. Synced."""
    select, thread, plan = s.select, s.thread, s.plan
    consumer_sync(plan)  # everyone has read what the round before counted
    lists.clear_histogram(s)
    consumer_sync(plan)
    for i in cutlass.range(thread, part.entries, plan.consumer_threads, unroll=1):
        key = lists.key_at(select, i)
        count_entry(select, range_, steps, key, lists.position_at(select, i))
    if thread < candidate.count:
        count_entry(select, range_, steps, candidate.key, candidate.position)
    consumer_sync(plan)


@cute.jit
def shrunk(s: Selecting, range_: Range, part: Part) -> Range:
    """The range from the lowest to the highest key in it that the list has: where many entries have
    few different keys, they are told apart at once. Ends synced; all have read the histogram."""
    select, thread, plan = s.select, s.thread, s.plan
    lowest, highest = signed(range_.high), signed(range_.low)
    width = range_.high - range_.low
    for i in cutlass.range(thread, part.entries, plan.consumer_threads, unroll=2):
        key = lists.key_at(select, i)
        if key != 0 and between(key, range_.low, width):
            lowest = cutlass.min(lowest, signed(key))
            highest = cutlass.max(highest, signed(key))
    lowest = cute.arch.warp_redux_sync(lowest, "min")
    highest = cute.arch.warp_redux_sync(highest, "max")
    consumer_sync(plan)  # everyone has read what the round before counted
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    if lane == 0:
        select.histogram[warp], select.histogram[WARP_SIZE + warp] = lowest, highest
    # All consumers: every warp's keys are there; they are read before the histogram is cleared.
    consumer_sync(plan)
    if lane < plan.consumer_warps:
        lowest, highest = select.histogram[lane], select.histogram[WARP_SIZE + lane]
    lowest = cute.arch.warp_redux_sync(lowest, "min")
    highest = cute.arch.warp_redux_sync(highest, "max")
    return range_._replace(low=unsigned(lowest), high=unsigned(highest))


def published_range(select: SelectBuffers, range_: Range) -> Range:
    """The range of the entries, of all that clusters published, that may win, at least two keys; of
    all entries until they have; see tiles.py."""
    low, high = Uint32(select.scratch[Scratch.RANGE]), Uint32(select.scratch[Scratch.RANGE + 1])
    return range_._replace(low=low, high=high)


@cute.jit
def few_at_bin(s: Selecting, kept: Int32) -> cutlass.Boolean:
    """Whether a cluster may cut its part at a bin with so many entries in it and above."""
    coord = s.coord
    few, fewer = s.plan.most_at_bin
    most = Int32(few) if coord.num_splits <= coord.num_parts + 1 else Int32(fewer)
    # Merging more than 2 topk takes longer than the second round that they save.
    return kept <= cutlass.min(most, 2 * s.output.topk)


@cute.jit
def find_threshold(
    s: Selecting,
    shared: cutlass.Boolean,
    to_bin: cutlass.Boolean,
    part: Part,
    phases: pipeline.PackedPhases,
    merges: Any = None,
) -> tuple[Threshold, pipeline.PackedPhases]:
    """Find the `topk`-th best among the lists of all CTAs, or of the caller if not `shared`. Ends
    synced.

    All entries are accepted if they are `topk` or fewer. The histogram holds the bins of the list's
    entries; it is destroyed. A worse entry is enough if `to_bin`: at most max_candidates more
    entries are accepted then, or of clusters that share rows what `few_at_bin` says,
    and `first_out_index` means nothing. Returns the events' phases, too.

    Args:
        merges: the lists have what clusters published, and the histogram the steps of
            `published_range`; None: never.
    """
    select, cluster, thread, plan = s.select, s.cluster, s.thread, s.plan
    topk = s.output.topk
    range_ = Range(Uint32(0), Uint32(0xFFFFFFFF), ~Uint32(LAST_POSITION), Uint32(0xFFFFFFFF))
    if not shared:
        range_ = cut_to_part(range_, part)
    left = topk  # the k among the entries in the range
    counted = cutlass.Boolean(True)
    first_out_index, total = Int32(0), Int32(0)
    candidate = Candidate(Uint32(0), Uint32(0), Int32(0))
    # `above` is the second warp's: the caller's entries above the range.
    above, state = Int32(0), Int32(LISTED)
    at_key, at_position = Uint32(0), Uint32(LAST_POSITION)
    if const_expr(merges is not None):
        range_ = published_range(select, range_)
        at_key = range_.low
    if thread == 0:
        select.scratch[Scratch.BEFORE] = Int32(0)
        select.scratch[Scratch.CANDIDATES] = Int32(0)
    while state != FOUND:
        if not counted and not shared and state == LISTED:
            range_ = shrunk(s, range_, part)
        steps = steps_of(range_)
        if not counted:
            listed = part.entries if state == LISTED else Int32(0)
            recount(s, range_, steps, part._replace(entries=listed), candidate)
        found = exchange.find_kth(s, shared, left, phases.phase(exchange.COUNTED))
        if shared:
            phases = phases.passed(exchange.COUNTED)
        lane = thread % WARP_SIZE
        bin_ = Bin(
            found.within,
            exchange.within_before(s, shared, found.bin, lane),
            select.histogram[found.bin],
        )
        if shared and thread // WARP_SIZE == 1:
            above += exchange.own_above(s, found.bin, lane)
        left -= found.above
        was_shared = shared
        if counted:
            total = found.total
            of_bin = range_._replace(low=lowest_key(found.bin), high=highest_key(found.bin))
            if const_expr(merges is not None):
                if merges:
                    of_bin = narrowed(range_, steps, found.bin)
            range_ = of_bin
            if total <= topk:
                state = Int32(FOUND)
                first_out_index += bin_.before
                shared = cutlass.Boolean(False)
        else:
            range_ = narrowed(range_, steps, found.bin)
        counted = cutlass.Boolean(False)
        gathers = state == LISTED and found.within <= plan.max_candidates
        cuts = gathers
        if const_expr(plan.splits):
            cuts = state == LISTED and few_at_bin(s, topk - left + found.within)
        if to_bin and cuts and not steps.by_position:
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
                candidate = gather(
                    s, was_shared, part, range_, bin_, phases.phase(exchange.GATHERED)
                )
                state = Int32(HELD)
                shared = cutlass.Boolean(False)
            elif was_shared:
                # received_full, the row's phase: every CTA's count above the bin has come
                # (st.async).
                cluster.received_full.wait(phases.phase(exchange.GATHERED))
            if was_shared:
                first_out_index += exchange.above_before(s, lane)
                phases = phases.passed(exchange.GATHERED)
        if state == HELD and found.within <= plan.lists.max_compared:
            at_key, at_position, before = compare(
                s, range_, candidate, found.within, left, Uint32(part.first)
            )
            first_out_index += before
            state = Int32(FOUND)
    consumer_sync(plan)
    return Threshold(at_key, at_position, first_out_index, total), phases
