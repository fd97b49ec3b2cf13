"""Long rows of small batches: several clusters, a *team* each of them, share a row.

One cluster is at most 16 CTAs, of some 132 that a device runs. A team ranks its part of the row as
a cluster ranks a row, but stops at a bin: what lies in better bins or in the bin of the k-th best
is *published*, each CTA into its own slot in device memory. The team that comes last ranks what was
published, again as a cluster ranks a row: each CTA takes neighbouring slots, as many as there are
teams. No team waits for another.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from flashdsa.dsl.cluster import send
from flashdsa.dsl.gmem import load2, store2
from flashdsa.dsl.warp import alloc_slot, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.bins import accepts
from flashdsa.kernels.indexer.sm90.listing import (
    clear_histogram,
    consumer_sync,
    key_at,
    position_at,
    put,
)
from flashdsa.kernels.indexer.sm90.memory import SCRATCH_COUNT, SCRATCH_PART, Mailboxes, Ranking
from flashdsa.kernels.indexer.sm90.place import Place
from flashdsa.kernels.indexer.sm90.plan import MAX_CLUSTER, SLOT_HEADER_WORDS
from flashdsa.kernels.indexer.sm90.ranges import Part
from flashdsa.kernels.indexer.sm90.threshold import Threshold

SLOTS_TOGETHER = 8
"""Of which a thread loads an entry each at a time."""


class Published(NamedTuple):
    """Device memory of one launch at a time. Counters are 0 between launches."""

    arrivals: Any  # (rows,) int32: CTAs of the row that have published
    slots: Any  # (CTAs, slot_words) int32: entries, first and last position; keys and positions


@cute.jit
def slot_of(published: Published, cta: Int32, plan: cutlass.Constexpr) -> Any:
    """Pointer to a CTA's slot."""
    return published.slots.iterator + Int64(cta) * plan.slot_words


@cute.jit
def publish(
    ranking: Ranking,
    published: Published,
    cta: Int32,
    part: Part,
    threshold: Threshold,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """The part's entries as good as the threshold into the caller's slot. Ends synced."""
    if thread == 0:
        ranking.scratch[SCRATCH_COUNT] = Int32(0)
    consumer_sync(plan)
    slot = slot_of(published, cta, plan)
    for first in cutlass.range(0, part.entries, plan.consumer_threads, unroll=1):
        i = first + thread
        key, position, wins = Uint32(0), Uint32(0), cutlass.Boolean(False)
        if i < part.entries:
            key, position = key_at(ranking, i), position_at(ranking, i)
            wins = accepts(key, position, threshold.key, threshold.position)
        place = alloc_slot(ranking.scratch.iterator + SCRATCH_COUNT, wins)
        if wins:
            at = slot + (SLOT_HEADER_WORDS + 2 * place)
            store2(at, Int32(key), Int32(position))
    consumer_sync(plan)
    if thread == 0:
        store2(slot, ranking.scratch[SCRATCH_COUNT], part.first)
        store2(slot + 2, part.end, Int32(0))
    consumer_sync(plan)


@cute.jit
def arrive(
    mail: Mailboxes,
    published: Published,
    place: Place,
    row: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> cutlass.Boolean:
    """Whether the caller's team is the row's last: the same in all its CTAs.

    Each CTA draws a ticket and shows it to its team; the last ticket is in the last team. What all
    teams published is visible to the last team: released and acquired with the tickets of the
    device, and with those of the cluster: the messages bring the numbers, the arrivals the order.
    A CTA has all of both before it can end.
    """
    lane = thread % WARP_SIZE
    if thread < WARP_SIZE:
        ticket = Int32(0)
        if lane == 0:
            # The consumer sync ordered everyone's stores before this thread's release.
            ticket = cute.arch.atomic_add(
                published.arrivals.iterator + row, Int32(1), sem="acq_rel", scope="gpu"
            )
            mail.tickets_full.expect_tx(place.parts * 4)
        ticket = cute.arch.shuffle_sync(ticket, 0)
        if lane < place.parts:
            box = mail.tickets.iterator + place.part
            send(box, [ticket], mail.tickets_full.at(), lane)
            mail.tickets_full.arrive_at_peer(lane)
        elif lane < MAX_CLUSTER:  # for the CTAs that the cluster does not have
            mail.tickets_full.arrive()
    # tickets_full: those of all CTAs of the team are there. A team has one row: the first phase.
    mail.tickets_full.wait(0)
    latest = Int32(0)
    if lane < place.parts:
        latest = mail.tickets[lane]
    latest = cute.arch.warp_redux_sync(latest, "max")
    is_last = latest == place.teams * place.parts - 1
    if is_last and place.part == 0 and thread == 0:
        (published.arrivals.iterator + row).store(Int32(0))
    return is_last


@cute.jit
def list_published(
    ranking: Ranking,
    published: Published,
    place: Place,
    cta: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> Int32:
    """The list becomes the entries of the caller's slots: as many as there are teams, one behind
    the other in the row; returns how many. Their part of the row is in scratch. Synced."""
    clear_histogram(ranking, thread, plan)
    lane = thread % WARP_SIZE
    team = place.group % place.teams
    first_slot = cta - place.part - team * place.parts + place.part * place.teams
    count, first, end = Int32(0), Int32(0), Int32(0)
    if lane < place.teams:
        slot = slot_of(published, first_slot + lane, plan)
        count, first = load2(slot)
        end, _ = load2(slot + 2)
    inclusive = prefix_sum(count, lane)
    consumer_sync(plan)
    for block in cutlass.range(0, place.teams, SLOTS_TOGETHER, unroll=1):
        # All loads are under way before the first one is waited for.
        keys = cute.make_rmem_tensor(SLOTS_TOGETHER, Int32)
        positions = cute.make_rmem_tensor(SLOTS_TOGETHER, Int32)
        for i in cutlass.range_constexpr(SLOTS_TOGETHER):
            keys[i], positions[i] = Int32(0), Int32(0)
            if thread < cute.arch.shuffle_sync(count, block + i):
                keys[i], positions[i] = load_entry(published, first_slot + block + i, thread, plan)
        for i in cutlass.range_constexpr(SLOTS_TOGETHER):
            entries = cute.arch.shuffle_sync(count, block + i)
            before = cute.arch.shuffle_sync(inclusive, block + i) - entries
            if thread < entries:
                put(
                    ranking,
                    before + thread,
                    Uint32(keys[i]),
                    positions[i],
                    cutlass.Boolean(True),
                )
            for at in cutlass.range(
                thread + plan.consumer_threads, entries, plan.consumer_threads, unroll=1
            ):
                key, position = load_entry(published, first_slot + block + i, at, plan)
                put(ranking, before + at, Uint32(key), position, cutlass.Boolean(True))
    last = place.teams - 1
    start, stop = cute.arch.shuffle_sync(first, 0), cute.arch.shuffle_sync(end, last)
    if thread == 0:
        ranking.scratch[SCRATCH_PART], ranking.scratch[SCRATCH_PART + 1] = start, stop
    consumer_sync(plan)
    return cute.arch.shuffle_sync(inclusive, last)


@cute.jit
def merged_part(ranking: Ranking, entries: Int32) -> Part:
    """What `list_published` left in scratch, where it needs no registers meanwhile."""
    return Part(ranking.scratch[SCRATCH_PART], ranking.scratch[SCRATCH_PART + 1], entries)


@cute.jit
def load_entry(
    published: Published, cta: Int32, index: Int32, plan: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """An entry that a CTA published."""
    return load2(slot_of(published, cta, plan) + (SLOT_HEADER_WORDS + 2 * index))
