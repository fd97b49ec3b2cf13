"""The winners' ids in ascending position.

A list that is in the order of positions gives them by itself; a bitmap sorts those of any other.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint32, const_expr, cute

from flashdsa.dsl.smem import load4
from flashdsa.dsl.warp import prefix_sums
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import (
    Selecting,
    before_warp,
    consumer_prefix,
    consumer_sync,
    warp_sums,
)
from flashdsa.kernels.indexer.emit.output import PAGE_BITS, Output, fill_rest, store_id, token_id
from flashdsa.kernels.indexer.select.keys import Part, accepts
from flashdsa.kernels.indexer.select.threshold import Threshold
from flashdsa.kernels.indexer.sizes import BITMAP_WORDS
from flashdsa.kernels.indexer.smem_views import SelectBuffers
from flashdsa.problem import PAGE_SIZE

ENTRIES_EACH = 4
"""Entries of a lane in one load."""
WARP_ENTRIES = ENTRIES_EACH * WARP_SIZE
WINNER_BITS = 31
"""Entries of a lane whose winners one register names; its sign bit stays 0."""


class WarpSpan(NamedTuple):
    """The neighbouring entries of the list that a warp takes, and their pages' ids."""

    first: Int32
    end: Int32
    ids: Int32  # lane i: first id of the i-th page of them


@cute.jit
def own_span(s: Selecting, row: Int32, part: Part) -> WarpSpan:
    """The calling warp's span; asks for the ids, which are needed when the threshold is known."""
    output, thread, plan = s.output, s.thread, s.plan
    lane = thread % WARP_SIZE
    warps = plan.consumer_warps
    each = (part.entries + warps * WARP_ENTRIES - 1) // (warps * WARP_ENTRIES) * WARP_ENTRIES
    if part.entries < warps * WARP_ENTRIES:
        each = (part.entries + warps * PAGE_SIZE - 1) // (warps * PAGE_SIZE) * PAGE_SIZE
    first = cutlass.min(thread // WARP_SIZE * each, part.entries)
    end = cutlass.min(first + each, part.entries)
    position = part.first + ((first >> PAGE_BITS) + lane) * PAGE_SIZE
    ids = Int32(0)
    if position < part.first + end:
        ids = token_id(output, row, position)
    return WarpSpan(first, end, ids)


@cute.jit
def winners_at(
    select: SelectBuffers, threshold: Threshold, last: Int32, index: Int32, end: Int32
) -> Int32:
    """Bit k: entry `index` + k of the list, before `end`, wins; those with the threshold's key win
    up to entry `last`."""
    winners = Int32(0)
    if index < end:
        keys = load4(select.keys, index // ENTRIES_EACH)
        for k in cutlass.range_constexpr(ENTRIES_EACH):
            key = Uint32(keys[k])
            if key > threshold.key or (key == threshold.key and index + k <= last):
                winners |= 1 << k
    return winners


@cute.jit
def emit_in_order(
    s: Selecting, row: Int32, part: Part, span: WarpSpan, threshold: Threshold
) -> None:
    """Write the part's entries as good as the threshold, after those of the previous parts.

    Entry i of the list is the part's i-th token. A warp takes 128 at a time, a lane four of them;
    the bits of one register say which of the lane's entries win, if it has enough bits; otherwise
    the entries are looked at once more.
    """
    select, output, thread, plan = s.select, s.output, s.thread, s.plan
    most_blocks = -(-plan.ordered_entries // (plan.consumer_warps * WARP_ENTRIES))
    remembers = const_expr(ENTRIES_EACH * most_blocks <= WINNER_BITS)
    blocks = (span.end - span.first + WARP_ENTRIES - 1) // WARP_ENTRIES
    lane = thread % WARP_SIZE
    # No token has key 0: if the threshold has it, all tokens win.
    last = Int32(threshold.position) - part.first if threshold.key != 0 else Int32(-1)
    winners, count = Int32(0), Int32(0)
    for block in cutlass.range(blocks, unroll=1):
        index = span.first + block * WARP_ENTRIES + ENTRIES_EACH * lane
        found = winners_at(select, threshold, last, index, span.end)
        if const_expr(remembers):
            winners |= found << (ENTRIES_EACH * block)
        else:
            count += Int32(cute.arch.popc(found))
    if const_expr(remembers):
        count = Int32(cute.arch.popc(winners))
    of_warp = cute.arch.warp_redux_sync(count, "add")
    sums = warp_sums(s, of_warp)
    to = threshold.first_out_index + before_warp(sums, thread)
    below = Int32(cute.arch.lanemask_lt())
    for block in cutlass.range(blocks, unroll=1):
        if const_expr(not remembers):
            again = span.first + block * WARP_ENTRIES + ENTRIES_EACH * lane
            winners = winners_at(select, threshold, last, again, span.end)
        mine = to
        for k in cutlass.range_constexpr(ENTRIES_EACH):
            vote = Int32(cute.arch.vote_ballot_sync(wins(winners, k)))
            mine += Int32(cute.arch.popc(vote & below))
            to += Int32(cute.arch.popc(vote))
        index = span.first + block * WARP_ENTRIES + ENTRIES_EACH * lane
        page = (index >> PAGE_BITS) - (span.first >> PAGE_BITS)
        value = cute.arch.shuffle_sync(span.ids, page) + (index & (PAGE_SIZE - 1))
        for k in cutlass.range_constexpr(ENTRIES_EACH):
            if wins(winners, k):
                store_id(output, row, mine, value + k, plan)
                mine += 1
        winners = winners >> ENTRIES_EACH
    fill_rest(s, row, threshold.total)
    consumer_sync(plan)


def wins(winners: Int32, k: int) -> cutlass.Boolean:
    """Whether the caller's `k`-th entry of the next block wins."""
    return (winners >> k) & 1 == 1


WORD_BITS = 32
GROUP = 4 * WORD_BITS
"""Positions of one vector load from the bitmap: two pages."""
ROWS_OF_WORDS = 4
"""Words of the bitmap that a thread takes of a row in pairs, at most."""


@cute.jit
def emit_by_position(s: Selecting, row: Int32, part: Part, threshold: Threshold) -> None:
    """Write the part's entries as good as the threshold, after those of the previous parts.

    A bitmap of the winners, window by window, gives their order, whatever the list's order is. It
    overlays the histogram.
    """
    select, output, thread, plan = s.select, s.output, s.thread, s.plan
    bitmap = select.bitmap
    window_size = BITMAP_WORDS * WORD_BITS
    written = Int32(0)
    for window in cutlass.range(part.first, part.end, window_size, unroll=1):
        size = cutlass.min(part.end - window, Int32(window_size))
        # Each thread owns `span` neighbouring positions: 8, 16, 32, or a multiple of four words.
        span = (size + plan.consumer_threads - 1) // plan.consumer_threads
        if span > WORD_BITS:
            span = (span + GROUP - 1) // GROUP * GROUP
        elif span > 16:
            span = Int32(32)
        else:
            span = Int32(16) if span > 8 else Int32(8)
        words = (span * plan.consumer_threads) // WORD_BITS
        # Asked for before they are needed: a thread with a word or less has positions of one page.
        begin = thread * span
        first = first_id(output, row, window + (begin & -WORD_BITS), part.end)
        second = first_id(output, row, window + begin + PAGE_SIZE, part.end)
        for word in cutlass.range(thread, words, plan.consumer_threads, unroll=1):
            bitmap[word] = Int32(0)
        consumer_sync(plan)
        mark_winners(s, part, threshold, window, size)
        consumer_sync(plan)
        count = Int32(0)
        for at in cutlass.range(begin, begin + span, GROUP, unroll=1):
            four = words_at(bitmap, at, span)
            for k in cutlass.range_constexpr(4):
                count += Int32(cute.arch.popc(four[k]))
        before, total = consumer_prefix(s, count)
        out_index = threshold.first_out_index + written + before
        for at in cutlass.range(begin, begin + span, GROUP, unroll=1):
            four = words_at(bitmap, at, span)
            if at > begin:
                first = first_id(output, row, window + at, part.end)
                second = first_id(output, row, window + at + PAGE_SIZE, part.end)
            for k in cutlass.range_constexpr(4):
                base = (first if const_expr(k < 2) else second) + k % 2 * WORD_BITS
                out_index = store_ids(output, row, out_index, four[k], base, plan)
        written += total
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
def store_ids(
    output: Output, row: Int32, out_index: Int32, bits: Int32, base: Int32, plan: cutlass.Constexpr
) -> Int32:
    """Write a word's ids, the first at index `base`; return the index after the last."""
    while bits != 0:
        lowest = bits & (Int32(0) - bits)
        store_id(output, row, out_index, base + 31 - clz(lowest), plan)
        bits = bits ^ lowest
        out_index += 1
    return out_index


@cute.jit
def first_id(output: Output, row: Int32, position: Int32, end: Int32) -> Int32:
    """The id of a token at the start of a page or of its second half; 0 from `end` on."""
    value = Int32(0)
    if position < end:
        value = token_id(output, row, position)
    return value


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
def words_at(bitmap: cute.Tensor, at: Int32, span: Int32) -> Any:
    """Four words of the bitmap from position `at` on; with a `span` of a word or less just its
    positions of one word."""
    words = cute.make_rmem_tensor(4, Int32)
    if span > WORD_BITS:
        loaded = load4(bitmap, at >> 7)
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
def emit_pair_row(s: Selecting, row: Int32, part: Part, threshold: Threshold) -> None:
    """Same as `emit_by_position`, by a team: neighbouring lanes have neighbouring words, so that
    they store to neighbouring addresses."""
    select, output, thread, plan = s.select, s.output, s.thread, s.plan
    bitmap, lane = select.bitmap, thread % WARP_SIZE
    window_size = ROWS_OF_WORDS * plan.consumer_threads * WORD_BITS
    written = Int32(0)
    for window in cutlass.range(part.first, part.end, window_size, unroll=1):
        size = cutlass.min(part.end - window, Int32(window_size))
        # A warp takes that many times 32 neighbouring words.
        each = (size + WORD_BITS * plan.consumer_threads - 1) // (WORD_BITS * plan.consumer_threads)
        begin = thread // WARP_SIZE * each * WARP_SIZE + lane
        ids = cute.make_rmem_tensor(ROWS_OF_WORDS, Int32)
        for i in cutlass.range_constexpr(ROWS_OF_WORDS):
            ids[i] = Int32(0)
            at = window + (begin + i * WARP_SIZE) * WORD_BITS
            if i < each:
                ids[i] = first_id(output, row, at, part.end)
            bitmap[thread + i * plan.consumer_threads] = Int32(0)
        consumer_sync(plan)
        mark_winners(s, part, threshold, window, size)
        consumer_sync(plan)
        words = cute.make_rmem_tensor(ROWS_OF_WORDS, Int32)
        counts = []
        for i in cutlass.range_constexpr(ROWS_OF_WORDS):
            words[i] = bitmap[begin + i * WARP_SIZE] if i < each else Int32(0)
            counts.append(Int32(cute.arch.popc(words[i])))
        sums = prefix_sums(counts, lane)
        of_warp = Int32(0)
        for i in cutlass.range_constexpr(ROWS_OF_WORDS):
            sums[i] += of_warp
            of_warp = cute.arch.shuffle_sync(sums[i], WARP_SIZE - 1)
        of_warps = warp_sums(s, of_warp)
        before = threshold.first_out_index + written + before_warp(of_warps, thread)
        for i in cutlass.range_constexpr(ROWS_OF_WORDS):
            store_ids(output, row, before + sums[i] - counts[i], words[i], ids[i], plan)
        written += cute.arch.warp_redux_sync(of_warps, "add")
        consumer_sync(plan)
    fill_rest(s, row, threshold.total)
    consumer_sync(plan)
