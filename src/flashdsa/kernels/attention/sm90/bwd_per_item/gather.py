"""Role gather: the rows of the lists into the tile of keys, a chunk as soon as it is free."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_per_item.context import Context, tile_behind, tiles_of
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import LEFT_CHUNKS, ORDER
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, CHUNK_BYTES, D_QK, TILE_KEYS

UNITS = CHUNK * BF16 // COPY_BYTES
"""Copies of a row of a chunk, each by a lane."""
ROWS_AT_ONCE = WARPGROUP_SIZE // UNITS
"""Rows of which the role copies a chunk by one instruction."""
TURNS = TILE_KEYS // ROWS_AT_ONCE


class Gatherer(NamedTuple):
    """Fills k. Signals k_full."""

    ctx: Context
    kv: cute.Tensor  # (S_kv, 576) bf16, columns in the order of `columns.py`


@cute.jit
def copy_tile(role: Gatherer, rows: list[Int32], to: Int32, unit: Int32, number: Int32) -> None:
    """Copy this thread's part of the CTA's tile of that number."""
    ctx = role.ctx
    sources = [role.kv.iterator + (Int64(row) * D_QK + unit * (COPY_BYTES // BF16)) for row in rows]
    for chunk in ORDER:
        # k_free: dQ of the tile before has read the chunk, and S before it.
        if cutlass.const_expr(chunk < LEFT_CHUNKS):
            ctx.barriers("k_free_left").wait_round(number - 1, chunk)
        else:
            ctx.barriers("k_free_right").wait_round(number - 1, chunk - LEFT_CHUNKS)
        for turn in cutlass.range_constexpr(TURNS):
            at = chunk * CHUNK_BYTES + turn * ROWS_AT_ONCE * CHUNK * BF16
            copy_units(to, sources[turn], rows[turn], [(at, chunk * CHUNK * BF16)])
        arrive_when_copied(ctx.barriers("k_full").at(chunk))


@cute.jit
def read_rows(line: cute.Pointer, tile: Int32) -> list[Int32]:
    """The rows of a tile that this thread copies from."""
    first = line + tile * TILE_KEYS
    return [(first + turn * ROWS_AT_ONCE).load() for turn in range(TURNS)]


@cute.jit
def gather_all(role: Gatherer) -> None:
    """All four warps: copy every tile of the CTA."""
    ctx = role.ctx
    unit, own = ctx.thread % UNITS, ctx.thread // UNITS
    to = ctx.arena.address("k") + swizzled_128(own, unit)
    number = Int32(0)
    for item in cutlass.range(ctx.cta, ctx.num_items, ctx.num_ctas, unroll=1):
        tiles = tiles_of(ctx, item)
        line = ctx.line_of(ctx.lists.rows, item) + own
        tile = tiles.first
        rows = read_rows(line, tile)
        for _ in cutlass.range(tiles.count, unroll=1):
            # The next tile's numbers come while this tile's chunks become free.
            tile = tile_behind(tile, tiles.count)
            ahead = read_rows(line, tile)
            copy_tile(role, rows, to, unit, number)
            rows = ahead
            number += 1
