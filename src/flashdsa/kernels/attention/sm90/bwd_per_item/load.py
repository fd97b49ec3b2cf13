"""Keys, Q and dO on their way to shared memory.

Role gather copies the rows of the lists into the tile of keys, a chunk as soon as it is free. The
warps of role high copy Q and dO of an item's 64 rows.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from flashdsa.dsl.cp_async import arrive_when_copied, copy_units, copy_word
from flashdsa.dsl.row_tiles import ROWS_AT_ONCE, TURNS, UNITS, row_sources
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_per_item.context import Context, tile_after, tiles_of
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import (
    HALF_BYTES,
    HALF_ROWS,
    ROWS_CHUNK_BYTES,
)
from flashdsa.kernels.attention.sm90.bwd_per_item.tickets import (
    is_paced,
    item_at,
    keep_pace,
    next_item,
    stop_pace,
)
from flashdsa.kernels.attention.sm90.core.backward import QUERY_ROWS, WORD_DIMS, place_of_word
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, ROWS
from flashdsa.plan.row_tiles import ROW_BYTES

WARPS = WARPGROUP_SIZE // WARP_SIZE
WARP_ROWS = ROWS // WARPS
"""Rows of an item that a warp copies."""


class Gatherer(NamedTuple):
    """Fills k. Signals k_full."""

    ctx: Context
    kv: cute.Tensor  # (S_kv, 576) bf16, columns in the order of `prepare.py`


@cute.jit
def copy_tile(role: Gatherer, rows: list[Int32], to: Int32, unit: Int32, number: Int32) -> None:
    """Copy this thread's part of the CTA's tile of that number."""
    ctx, tile = role.ctx, role.ctx.plan.tile
    sources = row_sources(role.kv, rows, unit)
    for chunk in ctx.plan.order:
        # k_free: dQ of the tile before has read the chunk, and S before it.
        if cutlass.const_expr(chunk < tile.half_chunks):
            ctx.memory.k_free_low.wait_round(number - 1, chunk)
        else:
            ctx.memory.k_free_high.wait_round(number - 1, chunk - tile.half_chunks)
        for turn in cutlass.range_constexpr(TURNS):
            at = chunk * tile.chunk_bytes + turn * ROWS_AT_ONCE * ROW_BYTES
            copy_units(to, sources[turn], rows[turn], [(at, chunk * ROW_BYTES)])
        arrive_when_copied(ctx.memory.k_full.at(chunk))


@cute.jit
def read_rows(ctx: Context, line: cute.Pointer, tile: Int32) -> list[Int32]:
    """The rows of a tile that this thread copies from."""
    first = line + tile * ctx.plan.tile.keys
    return [(first + turn * ROWS_AT_ONCE).load() for turn in range(TURNS)]


@cute.jit
def gather_item(
    role: Gatherer,
    item: Int32,
    place: tuple[Int32, Int32],
    to: Int32,
    number: Int32,
    paced: Boolean,
) -> Int32:
    """Copy every tile of an item; return the number of the CTA's tiles then.

    Args:
        place: this thread's row, of those copied at once, and its unit. to: where it copies to.
        paced: whether this thread waits for the other CTAs.
    """
    ctx = role.ctx
    own, unit = place
    tiles = tiles_of(ctx, item)
    line = ctx.line_of(ctx.lists.rows, item) + own
    tile = tiles.first
    rows = read_rows(ctx, line, tile)
    for _ in cutlass.range(tiles.count, unroll=1):
        # The next tile's numbers come while this tile's chunks become free.
        tile = tile_after(tile, tiles.count)
        ahead = read_rows(ctx, line, tile)
        if cutlass.const_expr(ctx.plan.tickets):
            if paced:
                keep_pace(ctx, number)
        copy_tile(role, rows, to, unit, number)
        rows = ahead
        number += 1
    return number


@cute.jit
def gather_all(role: Gatherer) -> None:
    """All four warps: copy every tile of the CTA."""
    ctx = role.ctx
    unit, own = ctx.thread % UNITS, ctx.thread // UNITS
    to = ctx.memory.k.address() + swizzled_128(own, unit)
    number = Int32(0)
    if cutlass.const_expr(ctx.plan.tickets):
        item, drawn = item_at(ctx, ctx.cta), Int32(0)
        paced = is_paced(ctx) & (ctx.thread == 0)
        while item >= 0:
            number = gather_item(role, item, (own, unit), to, number, paced)
            item = next_item(ctx, drawn)
            drawn += 1
        if paced:
            stop_pace(ctx)
    else:
        for item in cutlass.range(ctx.cta, ctx.num_items, ctx.num_ctas, unroll=1):
            number = gather_item(role, item, (own, unit), to, number, Boolean(False))


class Rows(NamedTuple):
    """Fills rows. Signals rows_full."""

    ctx: Context
    q: cute.Tensor  # (S * H, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16


@cute.jit
def copy_rows(role: Rows, item: Int32, items: Int32) -> None:
    """Copy an item's rows, a quarter of each chunk a warp and a word of each row a lane; zeros of a
    query that names no key, or is past the last. The order of columns is that of `prepare.py`.

    Args:
        items: with keys, of this CTA, before this one.
    """
    ctx, tile = role.ctx, role.ctx.plan.tile
    present = ctx.lists.present[ctx.group_of(item)]
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    half, own = warp // 2, warp * WARP_ROWS
    to = ctx.memory.rows.address() + place_of_word(lane) + own % HALF_ROWS * ROW_BYTES
    row = Int64(item) * ROWS + own
    q = role.q.iterator + (row * tile.d_qk + lane * WORD_DIMS)
    do = role.do.iterator + (row * tile.d_v + lane * WORD_DIMS)
    for chunk in cutlass.range(tile.value_chunks, unroll=1):
        # rows_free: dKV of the item before has read the chunk, and S and dP before it.
        ctx.memory.rows_free.wait_round(items - 1, chunk)
        place, column = to + chunk * ROWS_CHUNK_BYTES + half * 2 * HALF_BYTES, chunk * CHUNK
        copy_chunk(ctx, q + column, place, present, own, tile.d_qk)
        copy_chunk(ctx, do + column, place + HALF_BYTES, present, own, tile.d_v)
    if cutlass.const_expr(tile.has_rope):
        ctx.memory.rows_free.wait_round(items - 1, tile.value_chunks)
        place = to + ctx.plan.rope_at + half * HALF_BYTES
        copy_chunk(ctx, q + tile.d_v, place, present, own, tile.d_qk)
    arrive_when_copied(ctx.memory.rows_full.at())


@cute.jit
def copy_chunk(
    ctx: Context,
    source: cute.Pointer,
    to: Int32,
    present: Int32,
    own: Int32,
    dims: cutlass.Constexpr,
) -> None:
    """Copy 64 columns of the warp's rows of an item.

    Args:
        source: this lane's word of the first row. to: its address in the first row's line.
        own: the first row. dims: of a row.
    """
    for rows in cutlass.range_constexpr(WARP_ROWS // QUERY_ROWS):
        query = (own + rows * QUERY_ROWS) * ctx.plan.queries // ROWS
        none = ((present >> query) & 1) - 1
        for line in cutlass.range_constexpr(QUERY_ROWS):
            # The swizzle of row `line` of eight: its number into bits 4 to 6.
            row = rows * QUERY_ROWS + line
            copy_word(to ^ (line << 4), source, none, row * ROW_BYTES, row * dims * BF16)
