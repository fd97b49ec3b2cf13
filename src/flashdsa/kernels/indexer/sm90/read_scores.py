"""Given scores into the list: the top-k's counterpart of scoring pages."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from flashdsa.dsl.gmem import prefetch
from flashdsa.kernels.indexer.sm90.bins import bin_of, sortable
from flashdsa.kernels.indexer.sm90.listing import consumer_sync, count_in_bin
from flashdsa.kernels.indexer.sm90.memory import SCRATCH_COUNT, Ranking
from flashdsa.problem import PAGE_SIZE

PREFETCHED = 1 << 16
"""Scores that are on their way into the second-level cache before they are read."""
LINE_SCORES = 32
"""Scores of a cache line."""


@cute.jit
def prefetch_scores(
    scores: Any, row: Int32, begin: Int32, end: Int32, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """Start to bring scores `begin`... of the row into the second-level cache."""
    line = scores.iterator + Int64(row) * scores.stride[0]
    stretch = plan.consumer_threads * LINE_SCORES
    for at in cutlass.range(begin + thread * LINE_SCORES, end, stretch, unroll=1):
        prefetch(line + at)


@cute.jit
def load_stretch(
    values: cute.Tensor, line: Any, first: Int32, end: Int32, plan: cutlass.Constexpr
) -> None:
    """This thread's scores of a stretch: at `first`, one block of threads apart, before `end`."""
    for i in cutlass.range_constexpr(plan.read_together):
        position = first + i * plan.consumer_threads
        values[i] = Float32(0.0)
        if position < end:
            values[i] = (line + position).load()


@cute.jit
def read_batch(
    ranking: Ranking,
    scores: Any,
    batch: Any,
    entries: Int32,
    floor: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """Add scores while the list has room for another stretch: (its length, the next page).

    A page is 64 scores: (B, max_len) fp32 `scores` in device memory, any distance between rows.
    The list has room for a stretch at the start; see `refill_pages`.
    """
    stretch = plan.read_together * plan.consumer_threads
    segment = batch.segment
    row = segment.row
    line = scores.iterator + Int64(row) * scores.stride[0]
    last = cutlass.min((segment.first_page + segment.num_pages) * PAGE_SIZE, segment.length)
    begin = (segment.first_page + batch.begin) * PAGE_SIZE
    if batch.begin == 0:
        prefetch_scores(scores, row, begin, cutlass.min(begin + PREFETCHED, last), thread, plan)
    values = cute.make_rmem_tensor(plan.read_together, Float32)
    keys = cute.make_rmem_tensor(plan.read_together, Uint32)
    load_stretch(values, line, begin + thread, last, plan)
    reads = cutlass.Boolean(True)
    while reads:
        for i in cutlass.range_constexpr(plan.read_together):
            keys[i] = sortable(values[i])
        # The next stretch is on its way, into registers that are free now, while this one is added.
        load_stretch(values, line, begin + stretch + thread, last, plan)
        ahead = begin + PREFETCHED
        prefetch_scores(scores, row, ahead, cutlass.min(ahead + stretch, last), thread, plan)
        append_keys(ranking, keys, begin + thread, last, floor, plan)
        begin += stretch
        consumer_sync(plan)
        entries = ranking.scratch[SCRATCH_COUNT]
        consumer_sync(plan)  # everyone has read the count
        reads = begin < last and plan.list_capacity - entries >= stretch
    stop = cutlass.min(begin // PAGE_SIZE - segment.first_page, segment.num_pages)
    return entries, stop


@cute.jit
def append_keys(
    ranking: Ranking,
    keys: cute.Tensor,
    first: Int32,
    end: Int32,
    floor: Uint32,
    plan: cutlass.Constexpr,
) -> None:
    """Keys of positions `first`, one block of threads apart, with one atomic a warp."""
    masks = cute.make_rmem_tensor(plan.read_together, Int32)
    total = Int32(0)
    for i in cutlass.range_constexpr(plan.read_together):
        wanted = first + i * plan.consumer_threads < end and keys[i] >= floor
        masks[i] = Int32(cute.arch.vote_ballot_sync(wanted))
        total += Int32(cute.arch.popc(masks[i]))
    if total > 0:
        lane = cute.arch.lane_idx()
        place = Int32(0)
        if lane == 0:
            place = cute.arch.atomic_add(
                ranking.scratch.iterator + SCRATCH_COUNT, total, sem="relaxed", scope="cta"
            )
        place = cute.arch.shuffle_sync(place, 0)
        below = Int32(cute.arch.lanemask_lt())
        for i in cutlass.range_constexpr(plan.read_together):
            if (masks[i] >> lane) & 1 == 1:
                index = place + Int32(cute.arch.popc(masks[i] & below))
                ranking.keys[index] = Int32(keys[i])
                ranking.positions[index] = first + i * plan.consumer_threads
                count_in_bin(ranking, bin_of(keys[i]))
            place += Int32(cute.arch.popc(masks[i]))
