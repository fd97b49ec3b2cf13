"""The winners' ids best first: the group's first CTA gets all of them and sorts."""

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.dsl.cluster import send
from flashdsa.dsl.pipeline import PackedPhases
from flashdsa.kernels.indexer.sm90.emit import Output, store_id, token_id
from flashdsa.kernels.indexer.sm90.exchange import SORTED
from flashdsa.kernels.indexer.sm90.listing import consumer_sync, key_at, position_at
from flashdsa.kernels.indexer.sm90.memory import Mailboxes, Ranking
from flashdsa.kernels.indexer.sm90.place import Place
from flashdsa.kernels.indexer.sm90.plan import ENTRY_WORDS
from flashdsa.kernels.indexer.sm90.threshold import Threshold


@cute.jit
def send_winners(
    ranking: Ranking,
    mail: Mailboxes,
    place: Place,
    winners: Int32,
    first_place: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """The list's first `winners` entries to the group's first CTA."""
    for i in cutlass.range(thread, winners, plan.consumer_threads, unroll=1):
        box = mail.winners.iterator + (first_place + i) * ENTRY_WORDS
        entry = [ranking.keys[i], ranking.positions[i]]
        send(box.align(4 * ENTRY_WORDS), entry, mail.winners_full.at(), place.first)


@cute.jit
def emit_sorted(
    ranking: Ranking,
    mail: Mailboxes,
    output: Output,
    row: Int32,
    place: Place,
    own_winners: Int32,
    threshold: Threshold,
    phases: PackedPhases,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> PackedPhases:
    """The row's ids, best first. The list has the caller's winners only."""
    send_winners(ranking, mail, place, own_winners, threshold.first_place, thread, plan)
    if place.part == 0:
        winners = cutlass.min(threshold.total, Int32(plan.topk))
        sort_winners(ranking, mail, output, row, winners, phases.phase(SORTED), thread, plan)
    consumer_sync(plan)
    return phases.passed(SORTED)


@cute.jit
def sort_winners(
    ranking: Ranking,
    mail: Mailboxes,
    output: Output,
    row: Int32,
    winners: Int32,
    phase: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """The group's first CTA: sort all winners (Batcher's bitonic network)."""
    if thread == 0:
        expected = winners * (4 * ENTRY_WORDS)
        mail.winners_full.arrive_and_expect_tx(expected)
    # winners_full: those of every CTA are there. The list is free: its winners were sent too.
    mail.winners_full.wait(phase)
    consumer_sync(plan)
    for i in cutlass.range(thread, plan.topk, plan.consumer_threads, unroll=1):
        key, position = Int32(0), Int32(-1)
        if i < winners:
            key, position = mail.winners[2 * i], mail.winners[2 * i + 1]
        ranking.keys[i] = key
        ranking.positions[i] = position
    consumer_sync(plan)
    run = Int32(2)
    while run <= plan.topk:
        distance = run // 2
        while distance > 0:
            for i in cutlass.range(thread, plan.topk // 2, plan.consumer_threads, unroll=1):
                low = (i & ~(distance - 1)) * 2 + (i & (distance - 1))
                exchange(ranking, low, low + distance, low & run == 0)
            consumer_sync(plan)
            distance = distance // 2
        run = run * 2
    store_ids(ranking.positions, output, row, winners, thread, plan)


@cute.jit
def store_ids(
    ordered: cute.Tensor,
    output: Output,
    row: Int32,
    winners: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """The ids of the first `winners` positions in `ordered`, -1 behind them. Ends synced."""
    per_thread = plan.topk // plan.consumer_threads
    ids = cute.make_rmem_tensor(per_thread, Int32)
    for i in cutlass.range_constexpr(per_thread):
        place = thread + i * plan.consumer_threads
        ids[i] = Int32(-1)
        if place < winners:
            ids[i] = token_id(output, row, ordered[place])
    for i in cutlass.range_constexpr(per_thread):
        store_id(output, row, thread + i * plan.consumer_threads, ids[i], plan)
    consumer_sync(plan)


@cute.jit
def better(key: Uint32, position: Uint32, other_key: Uint32, other: Uint32) -> cutlass.Boolean:
    """Whether the first entry ranks before the second."""
    return key > other_key or (key == other_key and position < other)


@cute.jit
def exchange(ranking: Ranking, low: Int32, high: Int32, descending: cutlass.Boolean) -> None:
    """Put the better of two entries first, or last where the run ascends."""
    low_key, low_position = key_at(ranking, low), position_at(ranking, low)
    high_key, high_position = key_at(ranking, high), position_at(ranking, high)
    if better(high_key, high_position, low_key, low_position) == descending:
        ranking.keys[low] = Int32(high_key)
        ranking.positions[low] = Int32(high_position)
        ranking.keys[high] = Int32(low_key)
        ranking.positions[high] = Int32(low_position)
