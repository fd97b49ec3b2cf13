"""Destination of the ids, and output without scores: short rows, and the rest of an output row."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.consumers import Selecting
from flashdsa.kernels.indexer.schedule.work_tile import Rows, request_of, row_length
from flashdsa.problem import PAGE_SIZE

PAGE_BITS = PAGE_SIZE.bit_length() - 1


class Output(NamedTuple):
    """Destination of the ids, and what they are computed from."""

    topk_indices: Any  # (B, topk) int32, device memory
    block_table: Any  # (B / next_n, max_pages) int32, device memory; None: no pages
    id_table: Any  # the block table; None: ids are positions, until a gathered row's are stored
    num_pages: Int32
    rows: Rows


@cute.jit
def page_word(output: Output, row: Int32, position: Int32) -> Int32:
    """The word from which `id_in` makes a token's id: asked for, and not yet waited for."""
    if const_expr(output.id_table is None):
        return Int32(0)
    request = request_of(output.rows, row)
    at = Int64(request) * output.id_table.stride[0] + (position >> PAGE_BITS)
    return (output.id_table.iterator + at).load()


def id_in(output: Output, word: Int32, position: Int32) -> Int32:
    """page * 64 + offset of a token; its position if ids are positions."""
    if const_expr(output.id_table is None):
        return position
    return (word << PAGE_BITS) + (position & (PAGE_SIZE - 1))


def token_id(output: Output, row: Int32, position: Int32) -> Int32:
    """Same as `id_in`, waited for."""
    return id_in(output, page_word(output, row, position), position)


@cute.jit
def store_id(output: Output, row: Int32, out_index: Int32, value: Int32, plan: Any) -> None:
    """Store one id of the output row. A position of a gathered row becomes its slot."""
    if const_expr(plan.gathers):
        if value >= 0:
            value = slot_of(output, row, value)
    (output.topk_indices.iterator + (Int64(row) * plan.topk + out_index)).store(value)


def slot_of(output: Output, row: Int32, position: Int32) -> Int32:
    """The slot of a token of a row whose table has one for each."""
    at = Int64(request_of(output.rows, row)) * output.block_table.stride[0] + position
    return (output.block_table.iterator + at).load()


@cute.jit
def fill_rest(s: Selecting, row: Int32, total: Int32) -> None:
    """The group's last CTA: write -1 after the ids of a row of fewer than `topk` cached tokens."""
    coord, output, thread, plan = s.coord, s.output, s.thread, s.plan
    if coord.part == coord.num_parts - 1:
        for i in cutlass.range(total + thread, plan.topk, plan.consumer_threads, unroll=1):
            store_id(output, row, i, Int32(-1), plan)


@cute.jit
def emit_unscored_rows(
    output: Output, warp: Int32, warps: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Write rows of at most `topk` tokens: all their tokens in order, then -1.

    The warps share a row, as far as they are more than the rows: a warp that writes all of one is
    2 us late for its scores.
    """
    halvings = Int32(0)  # of a row; a whole division would be on the way of rows with scores
    if const_expr(not plan.gathers):  # a slot's place depends on all slots before it
        assert const_expr(plan.topk % PAGE_SIZE == 0)
        # The powers of two before the warps and after the rows.
        of_warps = Int32(31) - Int32(cute.arch.clz(warps))
        of_rows = Int32(32) - Int32(cute.arch.clz(output.rows.count - 1))
        most = (plan.topk // PAGE_SIZE).bit_length() - 1
        halvings = cutlass.min(cutlass.max(of_warps - of_rows, Int32(0)), most)
    size = Int32(plan.topk) >> halvings
    for i in cutlass.range(warp, output.rows.count << halvings, warps, unroll=1):
        row = i >> halvings
        first = (i - (row << halvings)) * size
        end = first + size
        length = row_length(output.rows, row)
        if length <= plan.unscored_length:
            if const_expr(output.block_table is None):
                emit_positions(output, row, first, end, length, lane, plan)
            elif const_expr(plan.gathers):
                emit_slots(output, row, length, lane, plan)
            else:
                page = first_pages(output, row, lane)
                pages = cached_pages(page, length, output.num_pages, lane)
                emit_pages(output, row, first, end, WARP_SIZE, pages, lane, plan.topk)


@cute.jit
def emit_positions(
    output: Output,
    row: Int32,
    first: Int32,
    end: Int32,
    length: Int32,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Write the places from `first` to `end` of all positions of the row, then -1."""
    for i in cutlass.range(first + lane, end, WARP_SIZE, unroll=2):
        store_id(output, row, i, i if i < length else Int32(-1), plan)


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
    for i in cutlass.range(written + lane, plan.topk, WARP_SIZE, unroll=1):
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
    topk: Int32,
) -> None:
    """One warp: write the row's tokens at the WARP_SIZE positions from `first` on, and from every
    `step`-th one before `end`, each after all cached tokens before it; and -1 to those of these
    places that are after all tokens."""
    ids = output.topk_indices.iterator + Int64(row) * topk
    for at in cutlass.range(first, end, step, unroll=2):
        position, index = at + lane, at >> PAGE_BITS
        start = index * PAGE_SIZE
        if const_expr(output.id_table is not None):
            start = cute.arch.shuffle_sync(pages.page, index) * PAGE_SIZE
        offset = position & (PAGE_SIZE - 1)
        if position < pages.length and (pages.cached >> index) & 1 == 1:
            before = Int32(cute.arch.popc(pages.cached & ((Int32(1) << index) - 1)))
            (ids + (before * PAGE_SIZE + offset)).store(start + offset)
        if pages.total <= position and position < end:
            (ids + position).store(Int32(-1))
