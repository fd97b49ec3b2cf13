"""One round of the search for a rank: counts of all CTAs that share a row, bin by bin.

Each CTA sends its counts of 128 groups of bins to all (`coarse`), finds the group that the rank
falls into, sends its counts of that group's bins (`fine`), and finds the bin. All find the same.
Messages are st.async: they count up bytes of the receiver's mbarrier, so that neither a fence nor
a barrier of the cluster is needed. A box is free again before its next message can come: `coarse`
of the next round follows this CTA's `fine`, and that `fine` follows its `coarse`. One warp
searches: an instruction of all sixteen takes four times as long.

A CTA that ranks its part alone looks into its own counts instead.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, const_expr, cute

from flashdsa.dsl.cluster import send
from flashdsa.dsl.smem import VECTOR, load4
from flashdsa.dsl.warp import first_lane_where, neighbours_sum, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.listing import consumer_sync
from flashdsa.kernels.indexer.sm90.memory import SCRATCH_FOUND, Mailboxes, Ranking
from flashdsa.kernels.indexer.sm90.place import Place
from flashdsa.kernels.indexer.sm90.plan import (
    BIN_GROUP,
    BIN_GROUPS,
    NUM_BINS,
)

WORD = 4
LOADED_TOGETHER = 4
"""CTAs whose counts are asked for before the first of them is added."""


COUNTED, GATHERED, SORTED = EVENTS = ("counted", "gathered", "sorted")
"""Phases that a consumer keeps: of coarse_full and fine_full, of received_full, of winners_full."""


class Found(NamedTuple):
    """What a round found."""

    bin: Int32  # that the rank falls into; bin 0 if there are fewer entries
    above: Int32  # entries in better bins
    within: Int32  # entries in the bin
    total: Int32  # entries in all bins


@cute.jit
def sum_groups(ranking: Ranking, mail: Mailboxes, thread: Int32) -> None:
    """The histogram's groups of bins into `own_coarse`; the caller syncs."""
    vectors = 2  # of a thread
    mine = Int32(0)
    for i in cutlass.range_constexpr(vectors):
        four = load4(ranking.histogram, vectors * thread + i)
        mine += four[0] + four[1] + four[2] + four[3]
    lanes = BIN_GROUP // VECTOR // vectors
    mine = neighbours_sum(mine, lanes)
    if thread % lanes == 0:
        mail.own_coarse[thread // lanes] = mine


@cute.jit
def send_coarse(mail: Mailboxes, place: Place, thread: Int32) -> None:
    """The counts of all groups to every CTA's `coarse`. A warp sends to one CTA: 512 bytes behind
    each other arrive sooner than as many in pieces from all warps."""
    lane = thread % WARP_SIZE
    peer = thread // WARP_SIZE
    assert const_expr(BIN_GROUPS == VECTOR * WARP_SIZE)
    four = load4(mail.own_coarse, lane)
    words = [four[i] for i in range(VECTOR)]
    box = (mail.coarse.iterator + (place.part * BIN_GROUPS + VECTOR * lane)).align(VECTOR * WORD)
    if peer < place.parts:
        send(box, words, mail.coarse_full.at(), place.first + peer)


@cute.jit
def send_fine(ranking: Ranking, mail: Mailboxes, place: Place, first: Int32, lane: Int32) -> None:
    """One warp: the counts of a group's bins, from bin `first` on, to every CTA's `fine`."""
    messages = BIN_GROUP // VECTOR
    message = lane % messages
    four = load4(ranking.histogram, first // VECTOR + message)
    words = [four[i] for i in range(VECTOR)]
    box = (mail.fine.iterator + (place.part * BIN_GROUP + message * VECTOR)).align(VECTOR * WORD)
    for peer in cutlass.range(lane // messages, place.parts, WARP_SIZE // messages, unroll=4):
        send(box, words, mail.fine_full.at(), place.first + peer)


@cute.jit
def find_group(
    mail: Mailboxes,
    place: Place,
    shared: cutlass.Boolean,
    rank: Int32,
    phase: Int32,
    lane: Int32,
) -> tuple[Int32, Int32, Int32]:
    """One warp, four groups a lane, lane 0 the best: (the group that the rank falls into or the
    lowest one, entries above it, all entries)."""
    quad = Int32(WARP_SIZE - 1) - lane
    counts = cute.make_rmem_tensor(VECTOR, Int32)
    counts.fill(0)
    if shared:
        # coarse_full: the counts of every CTA are there.
        mail.coarse_full.wait(phase)
        for block in cutlass.range(0, place.parts, LOADED_TOGETHER, unroll=1):
            for k in cutlass.range_constexpr(LOADED_TOGETHER):
                peer = cutlass.min(block + k, place.parts - 1)
                four = load4(mail.coarse, peer * (BIN_GROUPS // VECTOR) + quad)
                present = Int32(block + k < place.parts)
                for i in cutlass.range_constexpr(VECTOR):
                    counts[i] += present * four[i]
    else:
        counts.store(load4(mail.own_coarse, quad))
    inclusive = prefix_sum(counts[0] + counts[1] + counts[2] + counts[3], lane)
    above = inclusive - counts[0] - counts[1] - counts[2] - counts[3]
    found = first_lane_where(above < rank and inclusive >= rank)
    within = Int32(VECTOR - 1)  # the lane's best group
    for i in cutlass.range_constexpr(VECTOR - 1, 0, -1):
        if above + counts[i] < rank and within == i:
            above += counts[i]
            within = Int32(i - 1)
    return (
        cute.arch.shuffle_sync(VECTOR * quad + within, found),
        cute.arch.shuffle_sync(above, found),
        cute.arch.shuffle_sync(inclusive, WARP_SIZE - 1),
    )


@cute.jit
def search(
    ranking: Ranking,
    mail: Mailboxes,
    place: Place,
    shared: cutlass.Boolean,
    rank: Int32,
    phase: Int32,
    lane: Int32,
) -> None:
    """One warp: what a round finds, into scratch. With fewer entries than `rank` it is bin 0."""
    group, above, total = find_group(mail, place, shared, rank, phase, lane)
    first = group * BIN_GROUP
    bin_ = Int32(BIN_GROUP - 1) - lane  # of the group, lane 0 the best
    count = Int32(0)
    if shared:
        send_fine(ranking, mail, place, first, lane)
        # fine_full: likewise.
        mail.fine_full.wait(phase)
        for block in cutlass.range(0, place.parts, LOADED_TOGETHER, unroll=1):
            for k in cutlass.range_constexpr(LOADED_TOGETHER):
                peer = cutlass.min(block + k, place.parts - 1)
                own = mail.fine[peer * BIN_GROUP + bin_]
                count += own if block + k < place.parts else Int32(0)
    else:
        count = ranking.histogram[first + bin_]
    inclusive = above + prefix_sum(count, lane)
    if lane == first_lane_where(inclusive - count < rank and inclusive >= rank):
        found = Found(first + bin_, inclusive - count, count, total)
        for i in cutlass.range_constexpr(len(Found._fields)):
            ranking.scratch[SCRATCH_FOUND + i] = found[i]


@cute.jit
def find_rank(
    ranking: Ranking,
    mail: Mailboxes,
    place: Place,
    shared: cutlass.Boolean,
    rank: Int32,
    phase: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> Found:
    """The bin of the entry of `rank` (1 = best) among the entries of all CTAs of the group, or of
    the caller if not `shared`. Ends synced.

    The histogram is complete and synced, and keeps its counts.
    """
    assert const_expr(plan.consumer_threads * VECTOR * 2 == NUM_BINS)
    if shared and thread == 0:
        for barrier, counts in ((mail.coarse_full, BIN_GROUPS), (mail.fine_full, BIN_GROUP)):
            barrier.arrive_and_expect_tx(place.parts * (counts * WORD))
    sum_groups(ranking, mail, thread)
    consumer_sync(plan)
    if shared:
        send_coarse(mail, place, thread)
    if thread < WARP_SIZE:
        search(ranking, mail, place, shared, rank, phase, thread)
    consumer_sync(plan)
    return Found(*(ranking.scratch[SCRATCH_FOUND + i] for i in range(len(Found._fields))))


@cute.jit
def own_above(ranking: Ranking, mail: Mailboxes, bin_: Int32, lane: Int32) -> Int32:
    """One warp: the caller's entries in better bins than the one that a round found."""
    four = load4(mail.own_coarse, lane)
    counts = [four[i] for i in range(VECTOR)]
    above = Int32(0)
    for i in cutlass.range_constexpr(VECTOR):
        above += counts[i] if VECTOR * lane + i > bin_ // BIN_GROUP else Int32(0)
    if lane > bin_ % BIN_GROUP:
        above += ranking.histogram[bin_ // BIN_GROUP * BIN_GROUP + lane]
    return cute.arch.warp_redux_sync(above, "add")


@cute.jit
def within_before(
    mail: Mailboxes, place: Place, shared: cutlass.Boolean, bin_: Int32, lane: Int32
) -> Int32:
    """One warp: entries in the bin that a round found, of the CTAs before the caller."""
    within = Int32(0)
    if shared and lane < place.part:
        within = mail.fine[lane * BIN_GROUP + bin_ % BIN_GROUP]
    return cute.arch.warp_redux_sync(within, "add")


@cute.jit
def send_above(mail: Mailboxes, place: Place, above: Int32, lane: Int32) -> None:
    """One warp: the caller's entries above the last round's bin, to every CTA of the group."""
    if lane < place.parts:
        send(mail.above.iterator + place.part, [above], mail.received_full.at(), place.first + lane)


@cute.jit
def above_before(mail: Mailboxes, place: Place, lane: Int32) -> Int32:
    """One warp, behind received_full: what the CTAs before the caller sent."""
    above = Int32(0)
    if lane < place.part:
        above = mail.above[lane]
    return cute.arch.warp_redux_sync(above, "add")
