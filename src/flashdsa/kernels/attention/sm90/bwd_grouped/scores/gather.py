"""Role gather: the rows of the lists into the ring of keys, a chunk of 64 columns at a time."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.pipeline import PipelineState, advanced
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.context import Context, tiles_of
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import (
    BF16,
    CHUNK,
    CHUNK_BYTES,
    CHUNKS,
    D_QK,
)
from flashdsa.kernels.attention.sm90.core.tile import TILE_KEYS

UNITS = CHUNK * BF16 // COPY_BYTES
"""Copies of a row of a chunk, each by a lane."""
ROWS_AT_ONCE = WARPGROUP_SIZE // UNITS
"""Rows of which the role copies a chunk by one instruction."""
TURNS = TILE_KEYS // ROWS_AT_ONCE


class Gatherer(NamedTuple):
    """Fills k. Signals k_full."""

    ctx: Context
    kv: cute.Tensor  # (S_kv, 576) bf16


@cute.jit
def copy_tile(
    role: Gatherer, rows: list[Int32], to: Int32, unit: Int32, at: PipelineState
) -> PipelineState:
    """Copy this thread's part of a tile; return the ring's next state."""
    ring = role.ctx.arena.producer("k_full", "k_free")
    sources = [role.kv.iterator + (Int64(row) * D_QK + unit * (COPY_BYTES // BF16)) for row in rows]
    for chunk in cutlass.range_constexpr(CHUNKS):
        # k_free: both consumers have read what the slot held before.
        ring.acquire(at)
        for turn in cutlass.range_constexpr(TURNS):
            place = turn * ROWS_AT_ONCE * CHUNK * BF16, chunk * CHUNK * BF16
            copy_units(to + at.stage * CHUNK_BYTES, sources[turn], rows[turn], [place])
        arrive_when_copied(ring.full.at(at.stage))
        at = advanced(at, 1, role.ctx.plan.slots)
    return at


@cute.jit
def read_rows(line: cute.Pointer, tile: Int32, own: Int32) -> list[Int32]:
    """The rows of a tile that this thread copies from."""
    first = line + (tile * TILE_KEYS + own)
    return [(first + turn * ROWS_AT_ONCE).load() for turn in range(TURNS)]


@cute.jit
def gather_all(role: Gatherer) -> None:
    """All four warps: copy every tile of the CTA."""
    ctx = role.ctx
    unit, own = ctx.thread % UNITS, ctx.thread // UNITS
    to = ctx.arena.address("k") + swizzled_128(own, unit)
    at = PipelineState(Int32(0), Int32(0))
    for item in cutlass.range(ctx.first_item, ctx.num_items, ctx.num_ctas, unroll=1):
        group = ctx.group_of(item)
        tiles = tiles_of(ctx, group)
        line = ctx.lists.rows.iterator + Int64(group) * ctx.lists.rows.shape[1]
        rows = read_rows(line, Int32(0), own)
        for tile in cutlass.range(tiles, unroll=1):
            # The next tile's numbers come while this tile's rows are waited for.
            ahead = read_rows(line, cutlass.min(tile + 1, tiles - 1), own)
            at = copy_tile(role, rows, to, unit, at)
            rows = ahead
