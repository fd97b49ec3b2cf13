"""Loads to shared memory: matrices from the workspace, Q and dO.

Role matrices brings P and dS of every tile. Role rows brings the item's dims of Q and dO of the
group's rows, each warp 64 of them.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import arrive_when_copied, copy_word
from flashdsa.dsl.memory import Memory, Region
from flashdsa.dsl.pipeline import Barriers, RingProducer
from flashdsa.dsl.tma import load_bytes
from flashdsa.dsl.warp import lowest_bit
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import (
    PARTS,
)
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Context, Item, matrix_at
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import (
    DS_MATRIX,
    MATRICES,
    P_MATRIX,
    ROW_BLOCKS,
)
from flashdsa.kernels.attention.sm90.core.backward import QUERY_ROWS, WORD_DIMS, place_of_word
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, ROWS
from flashdsa.plan.row_tiles import ROW_BYTES


class DkvMemory(Memory):
    """Regions and barriers of `DkvPlan`."""

    rows: Region
    ring: Region
    matrix_full: Barriers
    matrix_free: Barriers
    rows_full: Barriers
    rows_free: Barriers


@cute.jit
def first_tile(ctx: Context, item: Item) -> Int32:
    """First tile of the item's list, which goes round: lists are in order of the keys, so groups
    that run at the same time and have much in common would else add to the same rows."""
    at_once = cutlass.max(ctx.work.num_ctas // ctx.plan.slices, Int32(1))
    return item.local % at_once * item.tiles // at_once


@cute.jit
def tile_at(item: Item, first: Int32, number: Int32) -> Int32:
    """Tile of the list that the item takes as number `number`; after the last: item.tiles."""
    tile = first + number
    if tile >= item.tiles:
        tile -= item.tiles
    if number >= item.tiles:
        tile = item.tiles
    return tile


class Matrices(NamedTuple):
    """Fills the ring. Signals matrix_full."""

    ctx: Context
    workspace: cute.Tensor  # (row blocks, bytes) uint8


@cute.jit
def load_matrices(role: Matrices) -> None:
    """One thread: load the matrices of the CTA's items, dS and then P of each row block."""
    ctx, keys = role.ctx, role.ctx.plan.tile
    full, free = ctx.memory.matrix_full, ctx.memory.matrix_free
    ring = ctx.memory.ring.bytes()
    number, item_number = Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        first = item.local * ROW_BLOCKS
        tile = first_tile(ctx, item)
        sources = [
            matrix_at(keys, role.workspace, first + block, tile, P_MATRIX)
            for block in range(ROW_BLOCKS)
        ]
        for _ in cutlass.range(item.tiles, unroll=1):
            slot, announced = free.state(number), full.state(number)
            for part in cutlass.range_constexpr(PARTS):
                at = slot.in_turn(part, PARTS)
                stage = announced.in_turn(part, PARTS).stage
                matrix = P_MATRIX if part % MATRICES else DS_MATRIX
                source = sources[part // MATRICES] + matrix * keys.p_bytes
                # matrix_free: the matrix that lay in the slot has been read.
                RingProducer(full, free).acquire(at)
                full.arrive_and_expect_tx(None, stage)
                load_bytes(ring + at.stage * keys.p_bytes, source, keys.p_bytes, full.at(stage))
            tile += 1
            step = Int32(MATRICES * keys.p_bytes)
            if tile == item.tiles:
                tile = Int32(0)
                step -= item.tiles * (MATRICES * keys.p_bytes)
            sources = [source + step for source in sources]
            number += PARTS
        item_number += ctx.work.num_ctas


class Rows(NamedTuple):
    """Fills rows. Signals rows_full."""

    ctx: Context
    q: cute.Tensor  # (S * H, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16
    present: cute.Tensor  # (groups,) int32
    heads: Int32  # 8, 16, ..., 128


@cute.jit
def copy_part(role: Rows, item: Item, present: Int32, part: cutlass.Constexpr) -> None:
    """Copy this warp's 64 dims of a row block's Q or dO, a word of each row a thread; zeros where
    the query names no key."""
    ctx = role.ctx
    plan, chunk = ctx.plan, ctx.thread // WARP_SIZE - 1
    block, operand = part // MATRICES, part % MATRICES
    source, dims = ((role.q, plan.tile.d_qk), (role.do, plan.tile.d_v))[operand]
    log2_heads = lowest_bit(role.heads)
    lane = ctx.thread % WARP_SIZE
    first_dim = item.slice * plan.slice_dims + chunk * CHUNK
    first_row = Int64(item.group * ROW_BLOCKS + block) * ROWS
    at = source.iterator + (first_row * dims + first_dim + lane * WORD_DIMS)
    to = ctx.memory.rows.address() + part * plan.part_bytes + chunk * (ROWS * ROW_BYTES)
    to = to + place_of_word(lane)
    if first_dim < dims:
        for rows in cutlass.range_constexpr(ROWS // QUERY_ROWS):
            query = (block * ROWS + rows * QUERY_ROWS) >> log2_heads
            none = ((present >> query) & 1) - 1
            for line in cutlass.range_constexpr(QUERY_ROWS):
                # The swizzle of row `line` of eight: its number into bits 4 to 6.
                row = rows * QUERY_ROWS + line
                offset = row * dims * BF16
                copy_word(to ^ (line << 4), at, none, row * ROW_BYTES, offset)


@cute.jit
def copy_all(role: Rows) -> None:
    """All warps of the role: copy Q and dO of the CTA's items that have keys, part by part."""
    ctx = role.ctx
    items, item_number = Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        if item.tiles > 0:
            present = (role.present.iterator + item.group).load()
            for part in cutlass.range_constexpr(PARTS):
                # rows_free: no tile of the item before needs the part.
                ctx.memory.rows_free.wait_round(items - 1, part)
                copy_part(role, item, present, part)
                arrive_when_copied(ctx.memory.rows_full.at(part))
            items += 1
        item_number += ctx.work.num_ctas
