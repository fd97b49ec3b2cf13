"""Role multiply: dS^T Q + P^T dO of a tile of 64 keys, each warpgroup every other tile.

A row of the tile's dKV is a key's, so the sum over all rows of the group is in one accumulator, and
each key's row of dKV is added to once for all of them.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.fragments import MMA_K, MMA_ROWS
from flashdsa.dsl.pipeline import arrive_warp
from flashdsa.dsl.wgmma import along_k, along_n
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.add import KEYS, add_tile
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.context import Context, first_tile, tile_at
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.order import (
    GROUP_WARPS,
    add_in_order,
    place_of,
)
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import (
    LAST_LATENT_DIMS,
    PART_BYTES,
    SLICE_DIMS,
    SLICES,
    WARPGROUPS,
)
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.publish import count_tile
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Item
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import IMAGE_BYTES, IMAGES, ROW_BLOCKS
from flashdsa.kernels.attention.sm90.core.backward import multiply
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, TILE_KEYS

IMAGE_STEP = MMA_K * BF16
"""Bytes from 16 rows of an image, where they are along its lines, to the next ones."""
ROWS_STEP = MMA_K * CHUNK * BF16
"""Bytes from 16 rows of Q or dO to the next ones."""


class Multiply(NamedTuple):
    """Reads rows and the ring. Signals rows_free, image_free; adds to dKV."""

    ctx: Context
    dkv: cute.Tensor  # (S_kv, 576) fp32; ordered: (buffers, S_kv, 576)
    warpgroup: Int32  # 0 or 1
    order: Any  # Order; None: additions are in any order


class Tile(NamedTuple):
    """A tile of an item, for the warpgroup that takes it."""

    first_image: Int32  # running number in the ring
    items: Int32  # the CTA's items with keys before this one
    opens: Boolean  # the warpgroup's first one of the item
    closes: Boolean  # its last one


@cute.jit
def release(role: Multiply, tile: Tile, part: cutlass.Constexpr) -> None:
    """Arrive: this warp has read the part's image, and after the item's last tile the part's
    rows."""
    ctx = role.ctx
    free = ctx.barriers("image_free")
    cute.arch.sync_warp()
    if ctx.thread % WARP_SIZE == 0:
        free.arrive(free.state(tile.first_image + part).stage)
        if tile.closes:
            ctx.barriers("rows_free").arrive(part)


@cute.jit
def multiply_tile(role: Multiply, acc: Any, tile: Tile, last: cutlass.Constexpr) -> None:
    """Compute all products of a tile; `last`: of the slice whose RoPE dims dO does not have."""
    ctx = role.ctx
    full = ctx.barriers("image_full")
    ring, rows = ctx.arena.address("ring"), ctx.arena.address("rows")
    for part in cutlass.range_constexpr(ctx.plan.parts):
        number = tile.first_image + part
        if tile.opens:
            ctx.barriers("rows_full").wait_round(tile.items, part)
            # The rows have been copied by threads; the fence shows them to wgmma.
            cute.arch.fence_proxy("async.shared", space="cta")
        full.wait_for(number)
        slot = ctx.barriers("image_free").state(number).stage
        warpgroup.fence()
        multiply(
            acc,
            LAST_LATENT_DIMS if last and part % IMAGES else SLICE_DIMS,
            (along_k(ring + slot * IMAGE_BYTES), IMAGE_STEP),
            (along_n(rows + part * PART_BYTES), ROWS_STEP),
            transposed=False,
            clear=part == 0,
        )
        warpgroup.commit_group()
        if cutlass.const_expr(part > 0):
            warpgroup.wait_group(1)
            release(role, tile, part - 1)
    warpgroup.wait_group(0)
    release(role, tile, ctx.plan.parts - 1)


@cute.jit
def read_keys(role: Multiply, item: Item, begin: Int32, number: Int32) -> list[Int32]:
    """Rows of dKV for this thread's rows of a tile that may not exist; -1 after the list's end.

    Args:
        begin: the item's first tile. number: of the tile among the item's.
    """
    ctx = role.ctx
    keys = [Int32(-1)] * KEYS
    first = (
        tile_at(item, begin, number) * TILE_KEYS
        + ctx.thread // WARP_SIZE * MMA_ROWS
        + ctx.thread % WARP_SIZE // 4
    )
    at = ctx.lists.row(item.group) + first
    for h in cutlass.range_constexpr(KEYS):
        if first + 8 * h < item.count:
            keys[h] = (at + 8 * h).load()
    return keys


@cute.jit
def multiply_item(
    role: Multiply, item: Item, items: Int32, tiles_before: Int32, last: cutlass.Constexpr
) -> None:
    """Multiply the warpgroup's tiles of an item.

    Args:
        items: the CTA's items with keys before this one. tiles_before: all their tiles.
    """
    tile = (role.warpgroup - tiles_before) & (WARPGROUPS - 1)
    if tile >= item.tiles:
        # No tile for this warpgroup: it does not need the rows, once they have come.
        for part in cutlass.range_constexpr(role.ctx.plan.parts):
            role.ctx.barriers("rows_full").wait_round(items, part)
            arrive_warp(role.ctx.barriers("rows_free"), part, role.ctx.thread)
    begin = first_tile(role.ctx, item)
    keys = read_keys(role, item, begin, tile)
    opens = Boolean(True)
    while tile < item.tiles:
        ahead = read_keys(role, item, begin, tile + WARPGROUPS)
        number = (tiles_before + tile) * role.ctx.plan.parts
        acc = cute.make_rmem_tensor(SLICE_DIMS // 2, Float32)
        if cutlass.const_expr(role.ctx.plan.row_blocks < max(ROW_BLOCKS)):
            # The first product clears them, but ptxas would serialise the products here.
            acc.fill(0.0)
        closes = tile + WARPGROUPS >= item.tiles
        multiply_tile(role, acc, Tile(number, items, opens, closes), last)
        if cutlass.const_expr(role.order is not None):
            place = place_of(role.order, role.dkv, item)
            add_in_order(place, acc, keys, tile, role.ctx.thread // WARP_SIZE)
            count_tile(counter_of(role))
        else:
            add_tile(role.dkv.iterator + item.slice * SLICE_DIMS, acc, keys)
        keys = ahead
        opens = Boolean(False)
        tile += WARPGROUPS


def counter_of(role: Multiply) -> Any:
    """Pointer to how many tiles the warp has added."""
    warp = role.warpgroup * GROUP_WARPS + role.ctx.thread // WARP_SIZE
    return role.ctx.arena.pointer("added", Int32) + warp


@cute.jit
def multiply_all(role: Multiply) -> None:
    """Multiply every item of the CTA."""
    ctx = role.ctx
    items, tiles, item_number = Int32(0), Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        if item.tiles > 0:
            if item.slice == SLICES - 1:
                multiply_item(role, item, items, tiles, True)
            else:
                multiply_item(role, item, items, tiles, False)
            items += 1
        tiles += item.tiles
        item_number += ctx.work.num_ctas
