"""The winners' ids into the output row, in ascending position or, sorted, best first."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute

from flashdsa.kernels.indexer.sm90.memory import Ranking
from flashdsa.kernels.indexer.sm90.plan import BITMAP_WORDS, WARP_SIZE
from flashdsa.kernels.indexer.sm90.schedule import Rows, row_length
from flashdsa.kernels.indexer.sm90.select import (
    accepts,
    compact,
    consumer_prefix,
    consumer_sync,
    four_at,
    key_at,
    position_at,
)
from flashdsa.problem import PAGE_SIZE

WORD_BITS = 32
PAGE_BITS = PAGE_SIZE.bit_length() - 1
GROUP = 4 * WORD_BITS
"""Positions of one vector load from the bitmap: two pages."""


class Output(NamedTuple):
    """Where ids go and what makes them."""

    topk_indices: Any  # (B, topk) int32, device memory
    block_table: Any  # (B, max_pages) int32, device memory; None: ids are positions
    num_pages: Int32
    rows: Rows


@cute.jit
def token_id(output: Output, row: Int32, position: Int32) -> Int32:
    """page * 64 + offset of a token; its position where there is no table."""
    if const_expr(output.block_table is None):
        return position
    at = Int64(row) * output.block_table.stride[0] + (position >> PAGE_BITS)
    page = (output.block_table.iterator + at).load()
    return (page << PAGE_BITS) + (position & (PAGE_SIZE - 1))


@cute.jit
def store_id(output: Output, row: Int32, place: Int32, value: Int32, plan: Any) -> None:
    """One slot of the output row."""
    (output.topk_indices.iterator + (Int64(row) * plan.topk + place)).store(value)


@cute.jit
def emit_best(
    ranking: Ranking,
    output: Output,
    row: Int32,
    length: Int32,
    entries: Int32,
    at_key: Uint32,
    at_position: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """The list's entries as good as the threshold; the rest of the row is -1."""
    if const_expr(plan.sorted):
        winners = compact(ranking, entries, at_key, at_position, thread, plan)
        emit_sorted(ranking, output, row, winners, thread, plan)
    else:
        emit_by_position(ranking, output, row, length, entries, at_key, at_position, thread, plan)


@cute.jit
def emit_by_position(
    ranking: Ranking,
    output: Output,
    row: Int32,
    length: Int32,
    entries: Int32,
    at_key: Uint32,
    at_position: Uint32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """A bitmap of the winners, window by window, gives their order whatever the list's is.

    It takes the place of histogram and candidates.
    """
    bitmap = ranking.bitmap
    window_size = BITMAP_WORDS * WORD_BITS
    written = Int32(0)
    for window in cutlass.range(0, length, window_size, unroll=1):
        size = cutlass.min(length - window, Int32(window_size))
        # Each thread owns `span` neighbouring positions: 8, 16, 32, or some times four words.
        span = (size + plan.consumer_threads - 1) // plan.consumer_threads
        if span > WORD_BITS:
            span = (span + GROUP - 1) // GROUP * GROUP
        elif span > 16:
            span = Int32(32)
        else:
            span = Int32(16) if span > 8 else Int32(8)
        words = (span * plan.consumer_threads) // WORD_BITS
        # Asked for before it is needed: with up to a word each, positions are of one page.
        begin = thread * span
        first = first_id(output, row, window + (begin & -WORD_BITS), length)
        second = first
        for word in cutlass.range(thread, words, plan.consumer_threads, unroll=1):
            bitmap[word] = Int32(0)
        consumer_sync(plan)
        for i in cutlass.range(thread, (entries + 3) // 4, plan.consumer_threads, unroll=1):
            keys = four_at(ranking.keys, i)
            places = four_at(ranking.positions, i)
            for k in cutlass.range_constexpr(4):
                position = Uint32(places[k])
                # Below the window is far above it, unsigned.
                in_window = position - Uint32(window) < Uint32(size) and 4 * i + k < entries
                if in_window and accepts(Uint32(keys[k]), position, at_key, at_position):
                    set_bit(bitmap, Int32(position) - window)
        consumer_sync(plan)
        count = Int32(0)
        for at in cutlass.range(begin, begin + span, GROUP, unroll=1):
            four = words_at(bitmap, at, span)
            for k in cutlass.range_constexpr(4):
                count += Int32(cute.arch.popc(four[k]))
        before, total = consumer_prefix(ranking, count, thread, plan)
        place = written + before
        for at in cutlass.range(begin, begin + span, GROUP, unroll=1):
            four = words_at(bitmap, at, span)
            if span > WORD_BITS:
                first = first_id(output, row, window + at, length)
                second = first_id(output, row, window + at + PAGE_SIZE, length)
            for k in cutlass.range_constexpr(4):
                bits = four[k]
                base = (first if const_expr(k < 2) else second) + k % 2 * WORD_BITS
                while bits != 0:
                    lowest = bits & (Int32(0) - bits)
                    ranking.ordered[place] = base + 31 - clz(lowest)
                    bits = bits ^ lowest
                    place += 1
        written += total
        consumer_sync(plan)
    # Through shared memory, so that neighbouring threads store neighbouring ids.
    for i in cutlass.range_constexpr(plan.topk // plan.consumer_threads):
        place = thread + i * plan.consumer_threads
        value = ranking.ordered[place] if place < written else Int32(-1)
        store_id(output, row, place, value, plan)
    consumer_sync(plan)


@cute.jit
def first_id(output: Output, row: Int32, position: Int32, length: Int32) -> Int32:
    """The id of a token at the start of a page or of its second half; 0 behind the row."""
    value = Int32(0)
    if position < length:
        value = token_id(output, row, position)
    return value


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
def set_bit(bitmap: cute.Tensor, offset: Int32) -> None:
    """Mark a position in the bitmap."""
    cute.arch.inline_ptx(
        "red.relaxed.cta.shared::cta.or.b32 [{$r0}], {$r1};",
        read_only_args=[bitmap.iterator + (offset >> 5), Int32(1) << (offset & 31)],
    )


def clz(bits: Int32) -> Int32:
    """Zeros in front of the first 1."""
    return Int32(cute.arch.clz(bits))


@cute.jit
def words_at(bitmap: cute.Tensor, at: Int32, span: Int32) -> Any:
    """Four words of the bitmap from position `at` on; with a `span` of a word or less just its
    positions of one word."""
    words = cute.make_rmem_tensor(4, Int32)
    if span > WORD_BITS:
        loaded = four_at(bitmap, at >> 7)
        for k in cutlass.range_constexpr(4):
            words[k] = loaded[k]
    else:
        bits = bitmap[at >> 5]
        if span < WORD_BITS:
            bits = bits & (((Int32(1) << span) - 1) << (at & 31))
        words[0] = bits
        for k in cutlass.range_constexpr(1, 4):
            words[k] = Int32(0)
    return words


@cute.jit
def better(key: Uint32, position: Uint32, other_key: Uint32, other: Uint32) -> cutlass.Boolean:
    """Whether the first entry ranks before the second."""
    return key > other_key or (key == other_key and position < other)


@cute.jit
def emit_sorted(
    ranking: Ranking,
    output: Output,
    row: Int32,
    winners: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Sort the list's first `winners` entries, best first (Batcher's bitonic network)."""
    for i in cutlass.range(winners + thread, plan.topk, plan.consumer_threads, unroll=1):
        ranking.keys[i] = Int32(0)
        ranking.positions[i] = Int32(-1)
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
def exchange(ranking: Ranking, low: Int32, high: Int32, descending: cutlass.Boolean) -> None:
    """Put the better of two entries first, or last where the run ascends."""
    low_key, low_position = key_at(ranking, low), position_at(ranking, low)
    high_key, high_position = key_at(ranking, high), position_at(ranking, high)
    if better(high_key, high_position, low_key, low_position) == descending:
        ranking.keys[low] = Int32(high_key)
        ranking.positions[low] = Int32(high_position)
        ranking.keys[high] = Int32(low_key)
        ranking.positions[high] = Int32(low_position)


@cute.jit
def emit_unscored_rows(
    output: Output, warp: Int32, warps: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Rows of at most `topk` tokens: all their tokens in order. A warp takes a row."""
    for row in cutlass.range(warp, output.rows.count, warps, unroll=1):
        length = row_length(output.rows, row)
        if length <= plan.unscored_length:
            if const_expr(output.block_table is None):
                emit_positions(output, row, length, lane, plan)
            else:
                emit_all(output, row, length, lane, plan)


@cute.jit
def emit_positions(
    output: Output, row: Int32, length: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Every position of the row, then -1."""
    for place in cutlass.range(lane, plan.topk, WARP_SIZE, unroll=4):
        store_id(output, row, place, place if place < length else Int32(-1), plan)


@cute.jit
def emit_all(
    output: Output, row: Int32, length: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Every token of the row but those of pages outside the cache, then -1."""
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    page = Int32(-1)
    if lane < pages:
        page = (
            output.block_table.iterator + (Int64(row) * output.block_table.stride[0] + lane)
        ).load()
    valid = page >= 0 and page < output.num_pages
    mask = cute.arch.vote_ballot_sync(valid)
    written = Int32(0)
    for i in cutlass.range(pages, unroll=1):
        id_ = cute.arch.shuffle_sync(page, i) * PAGE_SIZE
        tokens = cutlass.min(length - i * PAGE_SIZE, Int32(PAGE_SIZE))
        if (mask >> i) & 1 == 1:
            for offset in cutlass.range(lane, tokens, WARP_SIZE, unroll=1):
                store_id(output, row, written + offset, id_ + offset, plan)
            written += tokens
    for place in cutlass.range(written + lane, plan.topk, WARP_SIZE, unroll=1):
        store_id(output, row, place, Int32(-1), plan)
