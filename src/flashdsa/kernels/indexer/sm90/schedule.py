"""Which pages of which rows a CTA scores, worked out on the device from `seq_lens`.

All pages of the rows that must be scored lie on one line, row after row; the line is cut into
chunks of equal length, one a CTA. A piece of a row inside a chunk is a *segment*. When the rows
are so even that each can get its own CTAs at nearly no loss, every row's share of the line is
rounded up to whole chunks, so that no CTA works on two rows.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.kernels.indexer.sm90.plan import SEGMENT_WORDS, WARP_SIZE
from flashdsa.problem import PAGE_SIZE

(
    ROW,
    FIRST_PAGE,
    NUM_PAGES,
    LENGTH,
    PARTS,
    PART,
    FIRST_CHUNK,
    ODD_START,
    ROW_PAGES,
    HEAD_PAGES,
    CHUNK_PAGES,
) = range(11)
"""Words of a segment's description; a ROW of -1 ends the work.

PARTS CTAs share the row's ROW_PAGES, this is PART; they are CTAs FIRST_CHUNK..., and ODD_START says
that the first of them worked on another row before. Part 0 has HEAD_PAGES, the others CHUNK_PAGES,
the last one what is left.
"""


class Schedule(NamedTuple):
    """The cut of the line, the same in every CTA."""

    chunk: Int32  # pages of a CTA
    inverse: Float32  # of chunk
    aligned: Int32  # 1: rows begin at chunk boundaries
    total: Int32  # length of the line


class Rows(NamedTuple):
    """Where lengths come from."""

    seq_lens: Any  # (B,) int32, device memory
    count: Int32  # B
    max_length: Int32  # tokens that the block table has room for


@cute.jit
def row_length(rows: Rows, row: Int32) -> Int32:
    """Tokens of the row, clamped to what the block table can name; 0 beyond the last row."""
    length = Int32(0)
    if row < rows.count:
        length = cutlass.min(cutlass.max(rows.seq_lens[row], Int32(0)), rows.max_length)
    return length


@cute.jit
def pages_to_score(rows: Rows, row: Int32, plan: cutlass.Constexpr) -> Int32:
    """Pages of the row, 0 when all its tokens are among the best without scores."""
    length = row_length(rows, row)
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    if length <= plan.unscored_length:
        pages = Int32(0)
    return pages


@cute.jit
def make_schedule(rows: Rows, num_ctas: Int32, lane: Int32, plan: cutlass.Constexpr) -> Schedule:
    """Cut the line; a whole warp calls."""
    total = Int32(0)
    longest = Int32(0)
    scored = Int32(0)
    for row in cutlass.range(lane, rows.count, WARP_SIZE, unroll=4):
        pages = pages_to_score(rows, row, plan)
        total += pages
        longest = cutlass.max(longest, pages)
        if pages > 0:
            scored += 1
    total = cute.arch.warp_redux_sync(total, "add")
    longest = cute.arch.warp_redux_sync(longest, "max")
    scored = cutlass.max(cute.arch.warp_redux_sync(scored, "add"), Int32(1))
    even = (total + num_ctas - 1) // num_ctas
    chunk = even
    aligned = Int32(0)
    ctas_each = num_ctas // scored
    if ctas_each > 0:
        own = (longest + ctas_each - 1) // ctas_each
        if own * 8 <= even * 9 + 16:
            chunk = own
            aligned = Int32(1)
    # Merging costs more the more CTAs share a row: at most some 3 sqrt(pages) of them.
    least = Int32(cute.math.sqrt(Float32(longest), fastmath=True) * 0.334)
    chunk = cutlass.max(cutlass.max(chunk, least), Int32(plan.least_pages))
    inverse = Float32(1.0) / Float32(chunk)
    line = total
    if aligned == 1:
        padded = Int32(0)
        for row in cutlass.range(lane, rows.count, WARP_SIZE, unroll=4):
            padded += padded_pages(pages_to_score(rows, row, plan), chunk, inverse, aligned)
        line = cute.arch.warp_redux_sync(padded, "add")
    return Schedule(chunk, inverse, aligned, line)


@cute.jit
def divide(value: Int32, by: Int32, inverse: Float32) -> Int32:
    """value // by for values of up to 2**22 times as much, faster than a division."""
    quotient = Int32(Float32(value) * inverse)
    rest = value - quotient * by
    if rest < 0:
        quotient -= 1
    if rest >= by:
        quotient += 1
    return quotient


@cute.jit
def padded_pages(pages: Int32, chunk: Int32, inverse: Float32, aligned: Int32) -> Int32:
    """The row's share of the line."""
    share = pages
    if aligned == 1:
        share = divide(pages + chunk - 1, chunk, inverse) * chunk
    return share


@cute.jit
def describe_segment(
    segments: cute.Tensor,
    slot: Int32,
    row: Int32,
    start: Int32,
    begin: Int32,
    pages: Int32,
    length: Int32,
    end: Int32,
    schedule: Schedule,
) -> None:
    """Write a segment's description: the row starts at `start` on the line, the segment at `begin`
    and ends before `end`."""
    chunk, inverse = schedule.chunk, schedule.inverse
    first_chunk = divide(start, chunk, inverse)
    last_chunk = divide(start + pages - 1, chunk, inverse)
    at = slot * SEGMENT_WORDS
    segments[at + ROW] = row
    segments[at + FIRST_PAGE] = begin - start
    segments[at + NUM_PAGES] = cutlass.min(pages, end - start) - (begin - start)
    segments[at + LENGTH] = length
    segments[at + PARTS] = last_chunk - first_chunk + 1
    segments[at + PART] = divide(begin, chunk, inverse) - first_chunk
    segments[at + FIRST_CHUNK] = first_chunk
    segments[at + ROW_PAGES] = pages
    segments[at + HEAD_PAGES] = (first_chunk + 1) * chunk - start
    segments[at + CHUNK_PAGES] = chunk
    segments[at + ODD_START] = Int32(1) if start != first_chunk * chunk else Int32(0)
