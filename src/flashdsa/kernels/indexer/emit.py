"""The winners' ids in ascending position, and words of their scores for a launch that sorts them.

A list that is in the order of positions gives them by itself; a bitmap sorts those of any other.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, const_expr, cute

from flashdsa.dsl.smem import VECTOR, load4
from flashdsa.dsl.warp import prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.schedule.work_tile import Rows, request_of, row_length
from flashdsa.kernels.indexer.select.lists import key_at
from flashdsa.kernels.indexer.select.sort_keys import INVALID, Part, accepts, signed, word_of
from flashdsa.kernels.indexer.select.threshold import Threshold
from flashdsa.kernels.indexer.sizes import BITMAP_WORDS
from flashdsa.kernels.indexer.smem_views import Selecting, before_warp, consumer_sync, warp_sums
from flashdsa.problem import PAGE_SIZE

PAGE_BITS = PAGE_SIZE.bit_length() - 1


class Output(NamedTuple):
    """Destination of the ids, and what they are computed from."""

    topk_indices: Any  # (B, topk) int32, device memory, any distance between rows
    words: Any  # (B, topk) int32, device memory: of the ids' scores; (0, 0): not wanted
    block_table: Any  # (B / next_n, max_pages) int32, device memory
    num_pages: Int32
    slots: Int32  # 1: ids are slots of the cache; 0: positions
    rows: Rows

    @property
    def topk(self) -> Int32:
        return Int32(self.topk_indices.shape[1])

    def ids_of(self, row: Int32) -> Any:
        """Pointer to a row's ids."""
        return self.topk_indices.iterator + Int64(row) * self.topk_indices.stride[0]

    @property
    def wants_words(self) -> cutlass.Boolean:
        return self.words.shape[0] > 0

    def words_of(self, row: Int32) -> Any:
        """Pointer to the words of a row's ids."""
        return self.words.iterator + Int64(row) * self.topk


@cute.jit
def page_word(output: Output, row: Int32, position: Int32, plan: cutlass.Constexpr) -> Int32:
    """The page from which `id_in` makes a token's id: asked for, and not yet waited for. That of
    the row if ids are positions; those of gathered rows are, until they are stored."""
    page = position >> PAGE_BITS
    if const_expr(not plan.gathers):
        if output.slots != 0:
            at = Int64(request_of(output.rows, row)) * output.block_table.stride[0] + page
            page = (output.block_table.iterator + at).load()
    return page


def id_in(page: Int32, position: Int32) -> Int32:
    """page * 64 + offset of a token."""
    return (page << PAGE_BITS) + (position & (PAGE_SIZE - 1))


@cute.jit
def store_id(output: Output, row: Int32, out_index: Int32, value: Int32, plan: Any) -> None:
    """Store one id of the output row. A position of a gathered row becomes its slot."""
    if const_expr(plan.gathers):
        if value >= 0 and output.slots != 0:
            value = slot_of(output, row, value)
    (output.ids_of(row) + out_index).store(value)


def slot_of(output: Output, row: Int32, position: Int32) -> Int32:
    """The slot of a token of a row whose table has one for each."""
    at = Int64(request_of(output.rows, row)) * output.block_table.stride[0] + position
    return (output.block_table.iterator + at).load()


@cute.jit
def store_word(output: Output, row: Int32, out_index: Int32, key: Uint32) -> None:
    """Store the word of an id's score, if words are wanted."""
    if output.wants_words:
        (output.words_of(row) + out_index).store(word_of(signed(key)))


@cute.jit
def fill_words(output: Output, row: Int32, first: Int32, end: Int32, step: Int32) -> None:
    """Say that there are no scores at every `step`-th place from `first` on."""
    if output.wants_words:
        for i in cutlass.range(first, end, step, unroll=1):
            (output.words_of(row) + i).store(Int32(INVALID))


@cute.jit
def fill_rest(s: Selecting, row: Int32, total: Int32) -> None:
    """The group's last CTA: write -1 after the ids of a row of fewer than `topk` cached tokens."""
    coord, output, thread, plan = s.coord, s.output, s.thread, s.plan
    if coord.part == coord.num_parts - 1:
        for i in cutlass.range(total + thread, output.topk, plan.consumer_threads, unroll=1):
            store_id(output, row, i, Int32(-1), plan)
        fill_words(output, row, total + thread, output.topk, Int32(plan.consumer_threads))


@cute.jit
def emit_unscored_rows(
    output: Output, warp: Int32, warps: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Write rows that are not scored: all their tokens in order, then -1. The warps share a row,
    as far as they are more than the rows: a warp that writes all of one is 2 us late for its
    scores."""
    halvings = Int32(0)  # of a row; a whole division would be on the way of rows with scores
    pages_of_topk = (output.topk + PAGE_SIZE - 1) // PAGE_SIZE
    if const_expr(not plan.gathers):  # a slot's place depends on all slots before it
        # The powers of two before the warps and after the rows.
        of_warps = Int32(31) - Int32(cute.arch.clz(warps))
        of_rows = Int32(32) - Int32(cute.arch.clz(output.rows.count - 1))
        most = Int32(32) - Int32(cute.arch.clz(pages_of_topk - 1))
        halvings = cutlass.min(cutlass.max(of_warps - of_rows, Int32(0)), most)
    # Places of whole pages; the last part has fewer.
    size = ((pages_of_topk + (Int32(1) << halvings) - 1) >> halvings) * PAGE_SIZE
    for i in cutlass.range(warp, output.rows.count << halvings, warps, unroll=1):
        row = i >> halvings
        first = (i - (row << halvings)) * size
        end = cutlass.min(first + size, output.topk)
        length = row_length(output.rows, row)
        if length <= output.rows.unscored:
            # Words are wanted where only rows without tokens are not scored.
            fill_words(output, row, first + lane, end, Int32(WARP_SIZE))
            if const_expr(plan.gathers):
                emit_slots(output, row, length, lane, plan)
            else:
                page = first_pages(output, row, lane)
                pages = cached_pages(page, length, output.num_pages, lane)
                emit_pages(output, row, first, end, WARP_SIZE, pages, lane)


@cute.jit
def emit_slots(
    output: Output, row: Int32, length: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Write every slot of the row but those outside the cache, then -1."""
    below, written = Int32(cute.arch.lanemask_lt()), Int32(0)
    for first in cutlass.range(0, length, WARP_SIZE, unroll=1):
        slot = Int32(-1)
        if first + lane < length:
            slot = slot_of(output, row, first + lane)
        valid = slot >= 0 and slot >> PAGE_BITS < output.num_pages
        found = Int32(cute.arch.vote_ballot_sync(valid))
        if valid:
            place = written + Int32(cute.arch.popc(found & below))
            store_id(output, row, place, first + lane, plan)
        written += Int32(cute.arch.popc(found))
    for i in cutlass.range(written + lane, output.topk, WARP_SIZE, unroll=1):
        store_id(output, row, i, Int32(-1), plan)


class CachedPages(NamedTuple):
    """Pages of a row of at most as many as a warp has lanes."""

    page: Int32  # of the lane
    cached: Int32  # bits of those that the cache has
    length: Int32  # tokens of the row
    total: Int32  # tokens of pages that the cache has


@cute.jit
def first_pages(output: Output, row: Int32, lane: Int32) -> Int32:
    """The lane's page of the row, which is asked for without the row's length; -1: the table has
    fewer."""
    page = Int32(-1)
    if lane < output.block_table.shape[1]:
        at = Int64(request_of(output.rows, row)) * output.block_table.stride[0] + lane
        page = (output.block_table.iterator + at).load()
    return page


@cute.jit
def cached_pages(page: Int32, length: Int32, num_pages: Int32, lane: Int32) -> CachedPages:
    """All lanes of a warp, each with its page: see `CachedPages`."""
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    cached = Int32(cute.arch.vote_ballot_sync(lane < pages and page >= 0 and page < num_pages))
    total = Int32(cute.arch.popc(cached)) * PAGE_SIZE
    # Every page is full but the last.
    if pages > 0 and (cached >> (pages - 1)) & 1 == 1:
        total -= pages * PAGE_SIZE - length
    return CachedPages(page, cached, length, total)


@cute.jit
def emit_pages(
    output: Output,
    row: Int32,
    first: Int32,
    end: Int32,
    step: cutlass.Constexpr,
    pages: CachedPages,
    lane: Int32,
) -> None:
    """One warp: write the row's tokens at the WARP_SIZE positions from `first` on, and from every
    `step`-th one before `end`, each after all cached tokens before it; and -1 to those of these
    places that are after all tokens."""
    ids = output.ids_of(row)
    for at in cutlass.range(first, end, step, unroll=2):
        position, index = at + lane, at >> PAGE_BITS
        page = cute.arch.shuffle_sync(pages.page, index)
        start = (page if output.slots != 0 else index) * PAGE_SIZE
        offset = position & (PAGE_SIZE - 1)
        if position < pages.length and (pages.cached >> index) & 1 == 1:
            before = Int32(cute.arch.popc(pages.cached & ((Int32(1) << index) - 1)))
            (ids + (before * PAGE_SIZE + offset)).store(start + offset)
        if pages.total <= position and position < end:
            (ids + position).store(Int32(-1))


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
    assert const_expr(plan.lists.capacity <= plan.consumer_warps * WARP_SIZE * PAGE_SIZE)
    lane, pages = thread % WARP_SIZE, part.entries // PAGE_SIZE
    each = (pages + plan.consumer_warps - 1) // plan.consumer_warps
    first = cutlass.min(thread // WARP_SIZE * each, pages)
    count = cutlass.min(pages - first, each)
    words = Int32(0)
    if lane < count:
        words = page_word(output, row, part.first + (first + lane) * PAGE_SIZE, plan)
    return WarpSpan(first * PAGE_SIZE, count, words)


@cute.jit
def emit_in_order(
    s: Selecting, row: Int32, part: Part, span: WarpSpan, threshold: Threshold
) -> None:
    """Write the part's entries as good as the threshold, after those of the previous parts. Entry i
    of the list is the part's i-th token, and the list has whole pages. A lane keeps the winners of
    a page, a bit each."""
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
        first_id = id_in(word, part.first + span.first + page * PAGE_SIZE) + lane
        for half in cutlass.range_constexpr(HALVES):
            winners = cute.arch.shuffle_sync(upper if const_expr(half) else lower, page)
            if (winners >> lane) & 1 == 1:
                mine = to + Int32(cute.arch.popc(winners & below))
                store_id(output, row, mine, first_id + half * WARP_SIZE, plan)
                index = span.first + page * PAGE_SIZE + half * WARP_SIZE + lane
                store_word(output, row, mine, key_at(select, index))
            to += Int32(cute.arch.popc(winners))
    fill_rest(s, row, threshold.total)
    consumer_sync(plan)


WORD_BITS = 32
INDEX_OFFSET = BITMAP_WORDS // 2
"""Word of the bitmap from which on indices lie, if words are wanted."""
MOST_SUMS = VECTOR * WARP_SIZE
"""Sums of all warps in all rounds of a window, at most."""


@cute.jit
def emit_by_position(s: Selecting, row: Int32, part: Part, threshold: Threshold) -> None:
    """Write the part's entries as good as the threshold, after those of the previous parts. A
    bitmap of the winners, window by window, gives their order, whatever the list's order is. It
    overlays the histogram. If words are wanted, it is half as long: behind it lies, for each of its
    words, the index of the id of its first winner."""
    select, output, thread, plan = s.select, s.output, s.thread, s.plan
    bitmap, lane, warp = select.bitmap, thread % WARP_SIZE, thread // WARP_SIZE
    window_size = Int32(BITMAP_WORDS * WORD_BITS)
    if output.wants_words:
        window_size = Int32(INDEX_OFFSET * WORD_BITS)
    assert const_expr(BITMAP_WORDS // WARP_SIZE <= MOST_SUMS <= plan.consumer_threads)
    written = Int32(0)
    for window in cutlass.range(part.first, part.end, window_size, unroll=1):
        size = cutlass.min(part.end - window, window_size)
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
        page = word_before(output, row, window + begin, part.end, plan)
        for word in cutlass.range(
            thread, rounds * turn // WORD_BITS, plan.consumer_threads, unroll=1
        ):
            bitmap[word] = Int32(0)
        if thread < MOST_SUMS:
            select.candidates[thread] = Int32(0)
        consumer_sync(plan)
        visit_winners(s, row, part, threshold, window, size, mark)
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
            next_page = word_before(output, row, window + at + turn, part.end, plan)
            bits = bits_at(bitmap, at, span)
            count = Int32(cute.arch.popc(bits))
            before = prefix_sum(count, lane) - count
            before += sum_before(sums, i * plan.consumer_warps + warp, lane)
            base = id_in(page, window + (at & -WORD_BITS))
            to = threshold.first_out_index + written + before
            store_ids(output, row, to, bits, base, plan)
            if output.wants_words and at & (WORD_BITS - 1) == 0:
                bitmap[INDEX_OFFSET + (at >> WORD_BITS.bit_length() - 1)] = to
            page = next_page
        written += sum_before(sums, Int32(MOST_SUMS), lane)
        if output.wants_words:
            # All consumers: the indices of the window's ids are there.
            consumer_sync(plan)
            visit_winners(s, row, part, threshold, window, size, store_word_of)
        # All consumers: nobody reads the window any more.
        consumer_sync(plan)
    fill_rest(s, row, threshold.total)
    consumer_sync(plan)


@cute.jit
def visit_winners(
    s: Selecting,
    row: Int32,
    part: Part,
    threshold: Threshold,
    window: Int32,
    size: Int32,
    visit: cutlass.Constexpr,
) -> None:
    """Call `visit(s, row, offset, key)` for the window's winners among the part's entries."""
    select, thread, plan = s.select, s.thread, s.plan
    for i in cutlass.range(thread, (part.entries + 3) // 4, plan.consumer_threads, unroll=1):
        keys = load4(select.keys, i)
        positions = load4(select.positions, i)
        for k in cutlass.range_constexpr(4):
            position = Uint32(positions[k])
            # Unsigned: a position below the window wraps around to far above it.
            in_window = position - Uint32(window) < Uint32(size) and 4 * i + k < part.entries
            if in_window and accepts(Uint32(keys[k]), position, threshold.key, threshold.position):
                visit(s, row, Int32(position) - window, Uint32(keys[k]))


@cute.jit
def mark(s: Selecting, row: Int32, offset: Int32, key: Uint32) -> None:
    """Set a winner's bit."""
    set_bit(s.select.bitmap, offset)


@cute.jit
def store_word_of(s: Selecting, row: Int32, offset: Int32, key: Uint32) -> None:
    """Store the word of a winner's score at the index of its id."""
    bitmap = s.select.bitmap
    at, bit = offset >> WORD_BITS.bit_length() - 1, Int32(1) << (offset & (WORD_BITS - 1))
    index = bitmap[INDEX_OFFSET + at] + Int32(cute.arch.popc(bitmap[at] & (bit - 1)))
    store_word(s.output, row, index, key)


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
        store_id(output, row, out_index, base + 31 - Int32(cute.arch.clz(lowest)), plan)
        bits = bits ^ lowest
        out_index += 1


@cute.jit
def word_before(
    output: Output, row: Int32, position: Int32, end: Int32, plan: cutlass.Constexpr
) -> Int32:
    """The token's `page_word`; 0 from `end` on."""
    word = Int32(0)
    if position < end:
        word = page_word(output, row, position, plan)
    return word


@cute.jit
def set_bit(bitmap: cute.Tensor, offset: Int32) -> None:
    """Mark a position in the bitmap."""
    cute.arch.inline_ptx(
        "red.relaxed.cta.shared::cta.or.b32 [{$r0}], {$r1};",
        read_only_args=[bitmap.iterator + (offset >> 5), Int32(1) << (offset & 31)],
    )


@cute.jit
def bits_at(bitmap: cute.Tensor, at: Int32, span: Int32) -> Int32:
    """The bitmap's word with a position; of a `span` of less than a word just its positions."""
    bits = bitmap[at >> 5]
    if span < WORD_BITS:
        bits = bits & (((Int32(1) << span) - 1) << (at & 31))
    return bits
