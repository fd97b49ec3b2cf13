"""Role load: dS images by bulk copies, rows of keys by cp.async."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.dsl.tma import load_bytes
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.context import Context
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Item, image_of
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import DS_IMAGE, IMAGE_BYTES
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, CHUNK_BYTES, D_QK, TILE_KEYS

UNITS = CHUNK * BF16 // COPY_BYTES
"""Copies of a row of a chunk, each by a lane."""
ROWS_AT_ONCE = WARPGROUP_SIZE // UNITS
"""Keys of which the role copies a chunk by one instruction."""
TURNS = TILE_KEYS // ROWS_AT_ONCE
HALF_CHUNK = 2
"""Index of the chunk of 32 dims among the five chunks of half the dims."""
HALVED_DIMS = 4 * CHUNK
"""First dim of the chunk of which each half of the dims has one half."""


class Load(NamedTuple):
    """Fills the stages. Signals full."""

    ctx: Context
    spool: cute.Tensor  # (row blocks, bytes) uint8
    kv: cute.Tensor  # (S_kv, 576) bf16


@cute.jit
def read_ids(role: Load, item: Item, tile: Int32) -> list[Int32]:
    """Read the rows of kv of which this thread copies parts, of a tile that may not exist."""
    ids = [Int32(0)] * TURNS
    if tile < item.tiles:
        at = role.ctx.lists.row(item.group) + (tile * TILE_KEYS + role.ctx.thread // UNITS)
        ids = [(at + turn * ROWS_AT_ONCE).load() for turn in range(TURNS)]
    return ids


@cute.jit
def load_images(role: Load, item: Item, tile: Int32, stage: Int32) -> None:
    """One thread: load dS of the group's row blocks; the bytes count before any thread's
    arrival."""
    ctx = role.ctx
    full = ctx.arena.barriers("full")
    full.expect_tx(ctx.plan.images_bytes, stage)
    to = ctx.arena.bytes("stages") + stage * ctx.plan.stage_bytes
    for block in cutlass.range_constexpr(ctx.plan.row_blocks):
        place = item.local * ctx.plan.row_blocks + block
        source = image_of(role.spool, place, tile, DS_IMAGE)
        load_bytes(to + block * IMAGE_BYTES, source, IMAGE_BYTES, full.at(stage))


@cute.jit
def copy_keys(role: Load, item: Item, ids: list[Int32], to: Int32, unit: Int32) -> None:
    """Copy this thread's part of the item's dims of 64 rows of kv.

    Args:
        to: address of the thread's 16 bytes of its first row in the stage's first chunk.
    """
    plan = role.ctx.plan
    chunks = list(range(plan.key_chunks))
    first = item.slice * plan.slice_dims
    if cutlass.const_expr(plan.row_blocks == 2):
        # Dims 0-255 and 320-575 by chunks; dims 256-319 are a chunk of which each item has a half.
        chunks.remove(HALF_CHUNK)
        first = item.slice * (HALVED_DIMS + CHUNK)
    for turn in cutlass.range_constexpr(TURNS):
        row = role.kv.iterator + (Int64(ids[turn]) * D_QK + unit * (COPY_BYTES // BF16))
        at = turn * ROWS_AT_ONCE * CHUNK * BF16
        places = [
            (at + chunk * CHUNK_BYTES, number * CHUNK * BF16) for number, chunk in enumerate(chunks)
        ]
        copy_units(to, row + first, ids[turn], places)
        if cutlass.const_expr(plan.row_blocks == 2):
            if unit < UNITS // 2:
                half = row + (HALVED_DIMS + item.slice * (CHUNK // 2))
                copy_units(to, half, ids[turn], [(at + HALF_CHUNK * CHUNK_BYTES, 0)])


@cute.jit
def load_all(role: Load) -> None:
    """Load every tile of the CTA's items."""
    ctx = role.ctx
    ring = ctx.arena.producer("full", "empty")
    unit = ctx.thread % UNITS
    to = swizzled_128(ctx.thread // UNITS, unit) + ctx.plan.images_bytes
    number, item_number = Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        ids = read_ids(role, item, Int32(0))
        for tile in cutlass.range(item.tiles, unroll=1):
            ahead = read_ids(role, item, tile + 1)
            at = ring.state(number)
            # empty: both warpgroups have read the tile before in this stage.
            ring.acquire(at)
            if ctx.thread == 0:
                load_images(role, item, tile, at.stage)
            copy_keys(role, item, ids, ctx.stage(at.stage) + to, unit)
            arrive_when_copied(ring.full.at(at.stage))
            ids = ahead
            number += 1
        item_number += ctx.work.num_ctas
