"""The scores-only kernel's work: which pages of which rows a CTA scores, computed on the device.

All pages of the rows lie on one line, row after row; the line is cut into chunks of equal length,
one a CTA. The part of a row inside a chunk is a work tile. Every row's share of the line is
rounded up to whole chunks, so that no CTA works on two rows, when the rows are so even that this
costs nearly nothing.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.warp import lowest_bit, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.schedule.work_tile import (
    Rows,
    WorkTile,
    pages_to_score,
    row_length,
    whole_stages,
)


class Partition(NamedTuple):
    """The cut of the line, the same in every CTA."""

    chunk: Int32  # pages of a CTA
    inverse: Float32  # of chunk
    aligned: Int32  # 1: rows begin at chunk boundaries
    total: Int32  # length of the line


@cute.jit
def make_partition(rows: Rows, num_ctas: Int32, lane: Int32, plan: cutlass.Constexpr) -> Partition:
    """Cut the line; a whole warp calls."""
    total = Int32(0)
    longest = Int32(0)
    scored = Int32(0)
    for row in cutlass.range(lane, rows.count, WARP_SIZE, unroll=4):
        pages = pages_to_score(row_length(rows, row), plan)
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
    chunk = cutlass.max(chunk, Int32(1))
    inverse = Float32(1.0) / Float32(chunk)
    line = total
    if aligned == 1:
        padded = Int32(0)
        for row in cutlass.range(lane, rows.count, WARP_SIZE, unroll=4):
            padded += padded_pages(
                pages_to_score(row_length(rows, row), plan), chunk, inverse, aligned
            )
        line = cute.arch.warp_redux_sync(padded, "add")
    return Partition(chunk, inverse, aligned, line)


@cute.jit
def divide(value: Int32, by: Int32, inverse: Float32) -> Int32:
    """value // by for values up to 2**22 * by, faster than a division."""
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
def load_partition(
    ctx: Any,
    loader: cutlass.Constexpr,
    lane: Int32,
    cta: Int32,
    num_ctas: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """A load warp: load every work tile of this CTA, then announce that no more come.

    Args:
        ctx: has `rows`, and is what the loader takes. loader: a TileLoader.
    """
    partition = make_partition(ctx.rows, num_ctas, lane, plan)
    cursor = cta * partition.chunk
    end = cutlass.min(cursor + partition.chunk, partition.total)
    pages_done = Int32(0)
    number = Int32(0)
    block = Int32(0)  # the 32 rows from here on, which begin at `block_start` on the line
    block_start = Int32(0)
    while cursor < end:
        row = block + lane
        length = row_length(ctx.rows, row)
        pages = pages_to_score(length, plan)
        share = padded_pages(pages, partition.chunk, partition.inverse, partition.aligned)
        inclusive = prefix_sum(share, lane)
        block_share = cute.arch.shuffle_sync(inclusive, WARP_SIZE - 1)
        if block_start + block_share <= cursor:
            block += WARP_SIZE
            block_start += block_share
        else:
            # The row of at least one lane reaches beyond the cursor.
            reaches = cute.arch.vote_ballot_sync(block_start + inclusive > cursor)
            found = lowest_bit(reaches)
            row = block + found
            start = block_start + cute.arch.shuffle_sync(inclusive - share, found)
            pages = cute.arch.shuffle_sync(pages, found)
            share = cute.arch.shuffle_sync(share, found)
            stop = cutlass.min(start + pages, end)
            length = cute.arch.shuffle_sync(length, found)
            tile = WorkTile(row, cursor - start, stop - cursor, length, Int32(1), pages_done)
            ids = loader.announce(ctx, number, tile, lane, plan)
            loader.load_pages(ctx, tile, ids, None, lane, plan)
            pages_done += whole_stages(stop - cursor, plan)
            number += 1
            cursor = start + share
    loader.finish(ctx, number, lane, plan)
