"""Role rows: the item's dims of Q and dO of the group's rows, each warp for 64 of them."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import COPY_BYTES, arrive_when_copied, copy_units
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.dsl.warp import lowest_bit
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.sparse_mla.sm90.bwd.dkv.context import Context
from flashdsa.kernels.sparse_mla.sm90.bwd.dkv.plan import PART_BYTES, SLICE_DIMS
from flashdsa.kernels.sparse_mla.sm90.bwd.grouped import Item
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import BLOCK_ROWS, IMAGES
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import BF16, CHUNK, CHUNK_BYTES, D_QK, D_V

UNITS = CHUNK * BF16 // COPY_BYTES
"""Copies of a row of a chunk, each by a lane."""
ROWS_AT_ONCE = WARP_SIZE // UNITS
QUERY_ROWS = 8
"""Neighbouring rows that are of the same query: the number of heads is a multiple."""
PART_DIMS = (D_QK, D_V)
"""Of Q and of dO."""


class Rows(NamedTuple):
    """Fills rows. Signals rows_full."""

    ctx: Context
    q: cute.Tensor  # (S * H, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16
    present: cute.Tensor  # (groups,) int32
    heads: Int32  # 8, 16, ..., 128


@cute.jit
def copy_part(role: Rows, item: Item, present: Int32, part: cutlass.Constexpr) -> None:
    """This thread's copies of a row block's Q or dO; zeros where the query names no key."""
    ctx = role.ctx
    block, operand = part // IMAGES, part % IMAGES
    source, dims = (role.q, role.do)[operand], PART_DIMS[operand]
    log2_heads = lowest_bit(role.heads)
    warp, lane = ctx.thread // WARP_SIZE - 1, ctx.thread % WARP_SIZE
    unit, row_of_turn = lane % UNITS, lane // UNITS
    first_dim = item.slice * SLICE_DIMS + warp * CHUNK
    first_row = Int64(item.group * ctx.plan.row_blocks + block) * BLOCK_ROWS + row_of_turn
    at = source.iterator + (first_row * dims + first_dim + unit * (COPY_BYTES // BF16))
    to = ctx.arena.address("rows") + part * PART_BYTES + warp * CHUNK_BYTES
    if first_dim < dims:
        for rows in cutlass.range_constexpr(BLOCK_ROWS // QUERY_ROWS):
            query = (block * BLOCK_ROWS + rows * QUERY_ROWS) >> log2_heads
            none = ((present >> query) & 1) - 1
            for turn in cutlass.range_constexpr(QUERY_ROWS // ROWS_AT_ONCE):
                row = rows * QUERY_ROWS + turn * ROWS_AT_ONCE
                place = to + swizzled_128(turn * ROWS_AT_ONCE + row_of_turn, unit)
                offsets = [(rows * QUERY_ROWS * CHUNK * BF16, row * dims * BF16)]
                copy_units(place, at, none, offsets)


@cute.jit
def copy_all(role: Rows) -> None:
    """Three warps: Q and dO of the CTA's items that have keys, part by part."""
    ctx = role.ctx
    items, item_number = Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        if item.tiles > 0:
            present = (role.present.iterator + item.group).load()
            for part in cutlass.range_constexpr(ctx.plan.parts):
                # rows_free: no tile of the item before needs the part.
                ctx.barriers("rows_free").wait_round(items - 1, part)
                copy_part(role, item, present, part)
                arrive_when_copied(ctx.barriers("rows_full").at(part))
            items += 1
        item_number += ctx.work.num_ctas
