"""The winners' ids best first: the group's first CTA gets all of them and sorts."""

import cutlass
from cutlass import Int32, Uint32, cute

from flashdsa.dsl.cluster import send
from flashdsa.dsl.pipeline import PackedPhases
from flashdsa.kernels.indexer.consumers import Selecting, consumer_sync
from flashdsa.kernels.indexer.emit.output import store_id, token_id
from flashdsa.kernels.indexer.select.exchange import SORTED
from flashdsa.kernels.indexer.select.lists import key_at, position_at
from flashdsa.kernels.indexer.select.threshold import Threshold
from flashdsa.kernels.indexer.sizes import ENTRY_WORDS
from flashdsa.kernels.indexer.smem_views import SelectBuffers


@cute.jit
def send_winners(s: Selecting, winners: Int32, first_out_index: Int32) -> None:
    """Send the list's first `winners` entries to the group's first CTA."""
    select, cluster, coord, thread, plan = s.select, s.cluster, s.coord, s.thread, s.plan
    for i in cutlass.range(thread, winners, plan.consumer_threads, unroll=1):
        dst = cluster.winners.iterator + (first_out_index + i) * ENTRY_WORDS
        entry = [select.keys[i], select.positions[i]]
        send(dst.align(4 * ENTRY_WORDS), entry, cluster.winners_full.at(), coord.first_rank)


@cute.jit
def emit_sorted(
    s: Selecting, row: Int32, own_winners: Int32, threshold: Threshold, phases: PackedPhases
) -> PackedPhases:
    """Write the row's ids, best first. The list has the caller's winners only."""
    coord, plan = s.coord, s.plan
    send_winners(s, own_winners, threshold.first_out_index)
    if coord.part == 0:
        winners = cutlass.min(threshold.total, Int32(plan.topk))
        sort_winners(s, row, winners, phases.phase(SORTED))
    consumer_sync(plan)
    return phases.passed(SORTED)


@cute.jit
def sort_winners(s: Selecting, row: Int32, winners: Int32, phase: Int32) -> None:
    """The group's first CTA: sort all winners (Batcher's bitonic network)."""
    select, cluster, thread, plan = s.select, s.cluster, s.thread, s.plan
    if thread == 0:
        expected = winners * (4 * ENTRY_WORDS)
        cluster.winners_full.arrive_and_expect_tx(expected)
    # winners_full, the row's phase: the winners of every CTA have come (st.async). The list may be
    # overwritten after the sync: its own winners have been sent, too.
    cluster.winners_full.wait(phase)
    consumer_sync(plan)
    for i in cutlass.range(thread, plan.topk, plan.consumer_threads, unroll=1):
        key, position = Int32(0), Int32(-1)
        if i < winners:
            key, position = cluster.winners[2 * i], cluster.winners[2 * i + 1]
        select.keys[i] = key
        select.positions[i] = position
    consumer_sync(plan)
    run = Int32(2)
    while run <= plan.topk:
        distance = run // 2
        while distance > 0:
            for i in cutlass.range(thread, plan.topk // 2, plan.consumer_threads, unroll=1):
                low = (i & ~(distance - 1)) * 2 + (i & (distance - 1))
                exchange(select, low, low + distance, low & run == 0)
            consumer_sync(plan)
            distance = distance // 2
        run = run * 2
    store_ids(s, select.positions, row, winners)


@cute.jit
def store_ids(s: Selecting, ordered: cute.Tensor, row: Int32, winners: Int32) -> None:
    """Write the ids of the first `winners` positions in `ordered`, then -1. Ends synced."""
    output, thread, plan = s.output, s.thread, s.plan
    per_thread = plan.topk // plan.consumer_threads
    ids = cute.make_rmem_tensor(per_thread, Int32)
    for i in cutlass.range_constexpr(per_thread):
        out_index = thread + i * plan.consumer_threads
        ids[i] = Int32(-1)
        if out_index < winners:
            ids[i] = token_id(output, row, ordered[out_index])
    for i in cutlass.range_constexpr(per_thread):
        store_id(output, row, thread + i * plan.consumer_threads, ids[i], plan)
    consumer_sync(plan)


@cute.jit
def better(key: Uint32, position: Uint32, other_key: Uint32, other: Uint32) -> cutlass.Boolean:
    """Whether the first entry ranks before the second."""
    return key > other_key or (key == other_key and position < other)


@cute.jit
def exchange(select: SelectBuffers, low: Int32, high: Int32, descending: cutlass.Boolean) -> None:
    """Put the better of two entries first, or last where the run ascends."""
    low_key, low_position = key_at(select, low), position_at(select, low)
    high_key, high_position = key_at(select, high), position_at(select, high)
    if better(high_key, high_position, low_key, low_position) == descending:
        select.keys[low] = Int32(high_key)
        select.positions[low] = Int32(high_position)
        select.keys[high] = Int32(low_key)
        select.positions[high] = Int32(low_position)
