"""The winners' ids in ascending position.

A list that is in the order of positions gives them by itself; a bitmap sorts those of any other.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Uint32, const_expr, cute

from flashdsa.dsl.smem import VECTOR, load4
from flashdsa.dsl.warp import prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import (
    Selecting,
    before_warp,
    consumer_sync,
    warp_sums,
)
from flashdsa.kernels.indexer.emit.output import Output, fill_rest, id_in, page_word, store_id
from flashdsa.kernels.indexer.select.keys import Part, accepts
from flashdsa.kernels.indexer.select.lists import key_at
from flashdsa.kernels.indexer.select.threshold import Threshold
from flashdsa.kernels.indexer.sizes import BITMAP_WORDS
from flashdsa.problem import PAGE_SIZE

HALVES = 2
"""Halves of a page: a warp has an entry of a half in each lane."""


class WarpSpan(NamedTuple):
    """The neighbouring pages of a list in the order of positions that a warp takes, at most one a
    lane."""

    first: Int32  # index of its first entry
    pages: Int32
    words: Int32  # lane i: `page_word` of the i-th page


@cute.jit
def own_span(s: Selecting, row: Int32, part: Part) -> WarpSpan:
    """The calling warp's span; asks for the ids, which are needed when the threshold is known."""
    output, thread, plan = s.output, s.thread, s.plan
    assert const_expr(plan.ordered_entries <= plan.consumer_warps * WARP_SIZE * PAGE_SIZE)
    lane, pages = thread % WARP_SIZE, part.entries // PAGE_SIZE
    each = (pages + plan.consumer_warps - 1) // plan.consumer_warps
    first = cutlass.min(thread // WARP_SIZE * each, pages)
    count = cutlass.min(pages - first, each)
    words = Int32(0)
    if lane < count:
        words = page_word(output, row, part.first + (first + lane) * PAGE_SIZE)
    return WarpSpan(first * PAGE_SIZE, count, words)


@cute.jit
def emit_in_order(
    s: Selecting, row: Int32, part: Part, span: WarpSpan, threshold: Threshold
) -> None:
    """Write the part's entries as good as the threshold, after those of the previous parts.

    Entry i of the list is the part's i-th token, and the list has whole pages. A lane keeps the
    winners of a page, a bit each.
    """
    select, output, thread, plan = s.select, s.output, s.thread, s.plan
    lane = thread % WARP_SIZE
    # No token has key 0: if the threshold has it, all tokens win.
    last = Int32(threshold.position) - part.first if threshold.key != 0 else Int32(-1)
    lower, upper = Int32(0), Int32(0)
    for page in cutlass.range(span.pages, unroll=2):
        votes = []
        for half in cutlass.range_constexpr(HALVES):
            index = span.first + page * PAGE_SIZE + half * WARP_SIZE + lane
            key = key_at(select, index)
            wins = key > threshold.key or (key == threshold.key and index <= last)
            votes.append(Int32(cute.arch.vote_ballot_sync(wins)))
        lower = votes[0] if lane == page else lower
        upper = votes[1] if lane == page else upper
    count = Int32(cute.arch.popc(lower)) + Int32(cute.arch.popc(upper))
    ends = prefix_sum(count, lane)
    sums = warp_sums(s, cute.arch.shuffle_sync(ends, WARP_SIZE - 1))
    start = threshold.first_out_index + before_warp(sums, thread) + ends - count
    below = Int32(cute.arch.lanemask_lt())
    for page in cutlass.range(span.pages, unroll=1):
        to = cute.arch.shuffle_sync(start, page)
        word = cute.arch.shuffle_sync(span.words, page)
        first_id = id_in(output, word, part.first + span.first + page * PAGE_SIZE) + lane
        for half in cutlass.range_constexpr(HALVES):
            winners = cute.arch.shuffle_sync(upper if const_expr(half) else lower, page)
            if (winners >> lane) & 1 == 1:
                mine = to + Int32(cute.arch.popc(winners & below))
                store_id(output, row, mine, first_id + half * WARP_SIZE, plan)
            to += Int32(cute.arch.popc(winners))
    fill_rest(s, row, threshold.total)
    consumer_sync(plan)


WORD_BITS = 32
MOST_SUMS = VECTOR * WARP_SIZE
"""Sums of all warps in all rounds of a window, at most."""


@cute.jit
def emit_by_position(s: Selecting, row: Int32, part: Part, threshold: Threshold) -> None:
    """Write the part's entries as good as the threshold, after those of the previous parts.

    A bitmap of the winners, window by window, gives their order, whatever the list's order is. It
    overlays the histogram.
    """
    select, output, thread, plan = s.select, s.output, s.thread, s.plan
    bitmap, lane, warp = select.bitmap, thread % WARP_SIZE, thread // WARP_SIZE
    window_size = BITMAP_WORDS * WORD_BITS
    assert const_expr(BITMAP_WORDS // WARP_SIZE <= MOST_SUMS <= plan.consumer_threads)
    written = Int32(0)
    for window in cutlass.range(part.first, part.end, window_size, unroll=1):
        size = cutlass.min(part.end - window, Int32(window_size))
        # In each round a thread has `span` neighbouring positions, of the next thread's the last.
        span = Int32(WORD_BITS)
        if size <= WORD_BITS // 2 * plan.consumer_threads:
            span = Int32(WORD_BITS // 2)
        if size <= WORD_BITS // 4 * plan.consumer_threads:
            span = Int32(WORD_BITS // 4)
        turn = span * plan.consumer_threads
        rounds = (size + turn - 1) // turn
        begin = thread * span
        # Asked for before it is needed.
        page = word_before(output, row, window + begin, part.end)
        for word in cutlass.range(
            thread, rounds * turn // WORD_BITS, plan.consumer_threads, unroll=1
        ):
            bitmap[word] = Int32(0)
        if thread < MOST_SUMS:
            select.candidates[thread] = Int32(0)
        consumer_sync(plan)
        mark_winners(s, part, threshold, window, size)
        consumer_sync(plan)
        for i in cutlass.range(rounds, unroll=1):
            count = Int32(cute.arch.popc(bits_at(bitmap, begin + i * turn, span)))
            count = cute.arch.warp_redux_sync(count, "add")
            if lane == 0:
                select.candidates[i * plan.consumer_warps + warp] = count
        # All consumers: every warp's winners in every round are counted.
        consumer_sync(plan)
        sums = cute.make_rmem_tensor(VECTOR, Int32)
        sums.store(load4(select.candidates, lane))
        for i in cutlass.range(rounds, unroll=1):
            at = begin + i * turn
            next_page = word_before(output, row, window + at + turn, part.end)
            bits = bits_at(bitmap, at, span)
            count = Int32(cute.arch.popc(bits))
            before = prefix_sum(count, lane) - count
            before += sum_before(sums, i * plan.consumer_warps + warp, lane)
            base = id_in(output, page, window + (at & -WORD_BITS))
            to = threshold.first_out_index + written + before
            store_ids(output, row, to, bits, base, plan)
            page = next_page
        written += sum_before(sums, Int32(MOST_SUMS), lane)
        consumer_sync(plan)
    fill_rest(s, row, threshold.total)
    consumer_sync(plan)


@cute.jit
def mark_winners(
    s: Selecting, part: Part, threshold: Threshold, window: Int32, size: Int32
) -> None:
    """Set the bits of the window's winners among the part's entries."""
    select, thread, plan = s.select, s.thread, s.plan
    for i in cutlass.range(thread, (part.entries + 3) // 4, plan.consumer_threads, unroll=1):
        keys = load4(select.keys, i)
        positions = load4(select.positions, i)
        for k in cutlass.range_constexpr(4):
            position = Uint32(positions[k])
            # Unsigned: a position below the window wraps around to far above it.
            in_window = position - Uint32(window) < Uint32(size) and 4 * i + k < part.entries
            if in_window and accepts(Uint32(keys[k]), position, threshold.key, threshold.position):
                set_bit(select.bitmap, Int32(position) - window)


@cute.jit
def sum_before(sums: cute.Tensor, index: Int32, lane: Int32) -> Int32:
    """A warp, of whose lanes each has VECTOR neighbouring sums: the sum of those before `index`."""
    total = Int32(0)
    for k in cutlass.range_constexpr(VECTOR):
        total += sums[k] if VECTOR * lane + k < index else Int32(0)
    return cute.arch.warp_redux_sync(total, "add")


@cute.jit
def store_ids(
    output: Output, row: Int32, out_index: Int32, bits: Int32, base: Int32, plan: cutlass.Constexpr
) -> None:
    """Write a word's ids, the first at index `base`."""
    while bits != 0:
        lowest = bits & (Int32(0) - bits)
        store_id(output, row, out_index, base + 31 - clz(lowest), plan)
        bits = bits ^ lowest
        out_index += 1


@cute.jit
def word_before(output: Output, row: Int32, position: Int32, end: Int32) -> Int32:
    """The token's `page_word`; 0 from `end` on."""
    word = Int32(0)
    if position < end:
        word = page_word(output, row, position)
    return word


@cute.jit
def set_bit(bitmap: cute.Tensor, offset: Int32) -> None:
    """Mark a position in the bitmap."""
    cute.arch.inline_ptx(
        "red.relaxed.cta.shared::cta.or.b32 [{$r0}], {$r1};",
        read_only_args=[bitmap.iterator + (offset >> 5), Int32(1) << (offset & 31)],
    )


def clz(bits: Int32) -> Int32:
    """Number of zeros before the first 1."""
    return Int32(cute.arch.clz(bits))


@cute.jit
def bits_at(bitmap: cute.Tensor, at: Int32, span: Int32) -> Int32:
    """The bitmap's word with a position; of a `span` of less than a word just its positions."""
    bits = bitmap[at >> 5]
    if span < WORD_BITS:
        bits = bits & (((Int32(1) << span) - 1) << (at & 31))
    return bits
