"""Role rows: the item's dims of Q and dO of the group's rows, each warp for 64 of them, or more."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import arrive_when_copied, copy_word
from flashdsa.dsl.warp import lowest_bit
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.context import Context
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import PART_BYTES, SLICE_DIMS
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Item
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import IMAGES
from flashdsa.kernels.attention.sm90.core.backward import QUERY_ROWS, WORD_DIMS, place_of_word
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, CHUNK_BYTES, D_QK, D_V, ROWS

OCTETS = ROWS // QUERY_ROWS
PART_DIMS = (D_QK, D_V)
"""Dims of Q and of dO."""


class Rows(NamedTuple):
    """Fills rows. Signals rows_full."""

    ctx: Context
    q: cute.Tensor  # (S * H, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16
    present: cute.Tensor  # (groups,) int32
    heads: Int32  # 8, 16, ..., 128


@cute.jit
def copy_part(role: Rows, item: Item, present: Int32, part: cutlass.Constexpr) -> None:
    """Copy this thread's part of a row block's Q or dO."""
    warp = role.ctx.thread // WARP_SIZE - 1
    if cutlass.const_expr(role.ctx.plan.ordered):
        # Two warps, each with the first or the last chunk and a half of the one between.
        copy_chunk(role, item, present, part, 2 * warp, 0, OCTETS)
        copy_chunk(role, item, present, part, 1, warp * (OCTETS // 2), OCTETS // 2)
    else:
        copy_chunk(role, item, present, part, warp, 0, OCTETS)


@cute.jit
def copy_chunk(
    role: Rows,
    item: Item,
    present: Int32,
    part: cutlass.Constexpr,
    chunk: Any,
    begin: Any,
    octets: cutlass.Constexpr,
) -> None:
    """Copy this thread's part of 64 dims of a row block's Q or dO, a word of each row; zeros where
    the query names no key.

    Args:
        begin, octets: of the block's rows, eight at a time, the first ones and how many.
    """
    ctx = role.ctx
    block, operand = part // IMAGES, part % IMAGES
    source, dims = (role.q, role.do)[operand], PART_DIMS[operand]
    log2_heads = lowest_bit(role.heads)
    lane = ctx.thread % WARP_SIZE
    first_dim = item.slice * SLICE_DIMS + chunk * CHUNK
    first_row = Int64(item.group * ctx.plan.row_blocks + block) * ROWS + begin * QUERY_ROWS
    at = source.iterator + (first_row * dims + first_dim + lane * WORD_DIMS)
    to = ctx.arena.address("rows") + part * PART_BYTES + chunk * CHUNK_BYTES + place_of_word(lane)
    to += begin * (QUERY_ROWS * CHUNK * BF16)
    if first_dim < dims:
        for rows in cutlass.range_constexpr(octets):
            query = (block * ROWS + (begin + rows) * QUERY_ROWS) >> log2_heads
            none = ((present >> query) & 1) - 1
            for line in cutlass.range_constexpr(QUERY_ROWS):
                # The swizzle of row `line` of eight: its number into bits 4 to 6.
                row = rows * QUERY_ROWS + line
                offset = row * dims * BF16
                copy_word(to ^ (line << 4), at, none, row * CHUNK * BF16, offset)


@cute.jit
def copy_all(role: Rows) -> None:
    """All warps of the role: copy Q and dO of the CTA's items that have keys, part by part."""
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
