"""Q and dO of an item's 64 rows into shared memory, by the warps of role right."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import arrive_when_copied, copy_word
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_per_item.context import Context
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import (
    HALF_BYTES,
    HALF_ROWS,
    ROPE_PLACE,
    ROWS_CHUNK_BYTES,
    V_CHUNKS,
)
from flashdsa.kernels.attention.sm90.core.backward import QUERY_ROWS, WORD_DIMS, place_of_word
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, D_QK, D_V, ROWS

WARPS = WARPGROUP_SIZE // WARP_SIZE
ROPE_WARP = 3
"""Warp that copies the columns that only Q has."""


class Rows(NamedTuple):
    """Fills rows. Signals rows_full."""

    ctx: Context
    q: cute.Tensor  # (S * H, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16


@cute.jit
def copy_rows(role: Rows, item: Int32) -> None:
    """Copy the warp's chunks of an item, a word of each row a lane; zeros of a query that names no
    key, or is past the last. The order of columns is that of `columns.py`."""
    ctx = role.ctx
    present = ctx.lists.present[ctx.group_of(item)]
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    to = ctx.arena.address("rows") + place_of_word(lane)
    row = Int64(item) * ROWS
    q = role.q.iterator + (row * D_QK + lane * WORD_DIMS)
    do = role.do.iterator + (row * D_V + lane * WORD_DIMS)
    for chunk in cutlass.range(warp, V_CHUNKS, WARPS, unroll=1):
        place, column = to + chunk * ROWS_CHUNK_BYTES, chunk * CHUNK
        copy_chunk(ctx, q + column, place, present, D_QK, 2 * HALF_BYTES)
        copy_chunk(ctx, do + column, place + HALF_BYTES, present, D_V, 2 * HALF_BYTES)
    if warp == ROPE_WARP:
        copy_chunk(ctx, q + D_V, to + ROPE_PLACE, present, D_QK, HALF_BYTES)
    arrive_when_copied(ctx.barriers("rows_full").at())


@cute.jit
def copy_chunk(
    ctx: Context,
    source: cute.Pointer,
    to: Int32,
    present: Int32,
    dims: cutlass.Constexpr,
    half_bytes: cutlass.Constexpr,
) -> None:
    """Copy 64 columns of the item's rows.

    Args:
        source: this lane's word of the first row. to: its address in the first row's line.
        dims: of a row. half_bytes: from row 0 to row 32.
    """
    for rows in cutlass.range_constexpr(ROWS // QUERY_ROWS):
        query = rows * QUERY_ROWS * ctx.plan.queries // ROWS
        none = ((present >> query) & 1) - 1
        for line in cutlass.range_constexpr(QUERY_ROWS):
            # The swizzle of row `line` of eight: its number into bits 4 to 6.
            row = rows * QUERY_ROWS + line
            target = row // HALF_ROWS * half_bytes + row % HALF_ROWS * CHUNK * BF16
            copy_word(to ^ (line << 4), source, none, target, row * dims * BF16)
