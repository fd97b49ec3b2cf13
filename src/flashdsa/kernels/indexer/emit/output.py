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
    """Write rows of at most `topk` tokens: all their tokens in order. A warp takes a row."""
    for row in cutlass.range(warp, output.rows.count, warps, unroll=1):
        length = row_length(output.rows, row)
        if length <= plan.unscored_length:
            if const_expr(output.block_table is None):
                emit_positions(output, row, length, lane, plan)
            elif const_expr(plan.gathers):
                emit_slots(output, row, length, lane, plan)
            else:
                emit_all(output, row, length, lane, plan)


@cute.jit
def emit_positions(
    output: Output, row: Int32, length: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Write every position of the row, then -1."""
    for i in cutlass.range(lane, plan.topk, WARP_SIZE, unroll=4):
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


@cute.jit
def emit_all(
    output: Output, row: Int32, length: Int32, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Write every token of the row but those of pages outside the cache, then -1."""
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    page = Int32(-1)
    if lane < pages:
        request = request_of(output.rows, row)
        page = (
            output.block_table.iterator + (Int64(request) * output.block_table.stride[0] + lane)
        ).load()
    valid = page >= 0 and page < output.num_pages
    mask = cute.arch.vote_ballot_sync(valid)
    written = Int32(0)
    for i in cutlass.range(pages, unroll=1):
        id_ = i * PAGE_SIZE
        if const_expr(output.id_table is not None):
            id_ = cute.arch.shuffle_sync(page, i) * PAGE_SIZE
        tokens = cutlass.min(length - i * PAGE_SIZE, Int32(PAGE_SIZE))
        if (mask >> i) & 1 == 1:
            for offset in cutlass.range(lane, tokens, WARP_SIZE, unroll=1):
                store_id(output, row, written + offset, id_ + offset, plan)
            written += tokens
    for i in cutlass.range(written + lane, plan.topk, WARP_SIZE, unroll=1):
        store_id(output, row, i, Int32(-1), plan)
