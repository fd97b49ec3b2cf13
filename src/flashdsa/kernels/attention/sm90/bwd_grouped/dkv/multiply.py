"""Role multiply: dS^T Q + P^T dO of a tile of 64 keys, each warpgroup every other tile.

A row of the tile's dKV is a key's, so the sum over all rows of the group is in one accumulator, and
each key's row of dKV is added to once for all of them.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.fragments import MMA_K, MMA_ROWS
from flashdsa.dsl.gmem import add4_if
from flashdsa.dsl.pipeline import arrive_warp
from flashdsa.dsl.wgmma import along_k, along_n
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.load import first_tile, tile_at
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import PARTS, WARPGROUPS
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Context, Item
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import MATRICES
from flashdsa.kernels.attention.sm90.core.backward import PAIR_DIMS, four_dims, multiply
from flashdsa.kernels.attention.sm90.core.tile import BF16
from flashdsa.plan.row_tiles import ROW_BYTES

MATRIX_STEP = MMA_K * BF16
"""Bytes from 16 rows of a matrix, where they are along its lines, to the next ones."""
ROWS_STEP = MMA_K * ROW_BYTES
"""Bytes from 16 rows of Q or dO to the next ones."""
KEYS = 2
"""Rows of the tile in a thread, 8 apart."""
LINE_DIMS = 2 * PAIR_DIMS
"""Dims of a line: 128 bytes of dKV, which eight lanes add in one piece; pieces of 64 bytes take the
kernel 9 % longer."""


class Multiply(NamedTuple):
    """Reads rows and the ring. Signals rows_free, matrix_free; adds to dKV."""

    ctx: Context
    dkv: cute.Tensor  # (S_kv, 576) fp32
    warpgroup: Int32  # 0 or 1


class Tile(NamedTuple):
    """A tile of an item, for the warpgroup that takes it."""

    first_matrix: Int32  # running number in the ring
    items: Int32  # the CTA's items with keys before this one
    opens: Boolean  # the warpgroup's first one of the item
    closes: Boolean  # its last one


@cute.jit
def release(role: Multiply, tile: Tile, part: cutlass.Constexpr) -> None:
    """Arrive: this warp has read the part's matrix, and after the item's last tile the part's
    rows."""
    ctx = role.ctx
    free = ctx.memory.matrix_free
    cute.arch.sync_warp()
    if ctx.thread % WARP_SIZE == 0:
        free.arrive(free.state(tile.first_matrix + part).stage)
        if tile.closes:
            ctx.memory.rows_free.arrive(part)


@cute.jit
def multiply_tile(role: Multiply, acc: Any, tile: Tile, last: cutlass.Constexpr) -> None:
    """Compute all products of a tile; `last`: of the last slice, whose RoPE dims dO does not
    have."""
    ctx, plan = role.ctx, role.ctx.plan
    full = ctx.memory.matrix_full
    ring, rows = ctx.memory.ring.address(), ctx.memory.rows.address()
    dims = plan.last_dims if last else plan.slice_dims
    for part in cutlass.range_constexpr(PARTS):
        number = tile.first_matrix + part
        if tile.opens:
            ctx.memory.rows_full.wait_round(tile.items, part)
            # The rows have been copied by threads; the fence shows them to wgmma.
            cute.arch.fence_proxy("async.shared", space="cta")
        full.wait_for(number)
        slot = ctx.memory.matrix_free.state(number).stage
        warpgroup.fence()
        multiply(
            acc,
            plan.last_value_dims if last and part % MATRICES else dims,
            (along_k(ring + slot * plan.tile.p_bytes), MATRIX_STEP),
            (along_n(rows + part * plan.part_bytes), ROWS_STEP),
            transposed=False,
            clear=part == 0,
        )
        warpgroup.commit_group()
        if cutlass.const_expr(part > 0):
            warpgroup.wait_group(1)
            release(role, tile, part - 1)
    warpgroup.wait_group(0)
    release(role, tile, PARTS - 1)


@cute.jit
def read_keys(role: Multiply, item: Item, begin: Int32, number: Int32) -> list[Int32]:
    """Rows of dKV for this thread's rows of a tile that may not exist; -1 after the list's end.

    Args:
        begin: the item's first tile. number: of the tile among the item's.
    """
    ctx = role.ctx
    keys = [Int32(-1)] * KEYS
    first = (
        tile_at(item, begin, number) * ctx.plan.tile.keys
        + ctx.thread // WARP_SIZE * MMA_ROWS
        + ctx.thread % WARP_SIZE // 4
    )
    at = ctx.lists.row(item.group) + first
    for h in cutlass.range_constexpr(KEYS):
        if first + 8 * h < item.count:
            keys[h] = (at + 8 * h).load()
    return keys


@cute.jit
def add_tile(
    dkv: Any, acc: Any, keys: list[Int32], dims: cutlass.Constexpr, plan: cutlass.Constexpr
) -> None:
    """Add this thread's accumulators to dKV of the rows `keys`; a negative key has no row.

    Args:
        dkv: pointer to the first row's first dim of the slice. dims: of the slice.

    The four lanes of a row have 64 bytes of two lines each time. They exchange with the four lanes
    of the next row, so that all eight have 128 bytes of one row, and then of the other.
    """
    lane = cute.arch.lane_idx()
    is_next = lane // 4 % 2 == 1
    dim = lane // 4 % 2 * PAIR_DIMS + lane % 4 * 4
    for h in cutlass.range_constexpr(KEYS):
        others = cute.arch.shuffle_sync_bfly(keys[h], 4)
        key, next_key = (others if is_next else keys[h]), (keys[h] if is_next else others)
        row = dkv + (Int64(key) * plan.tile.d_qk + dim)
        next_row = dkv + (Int64(next_key) * plan.tile.d_qk + dim)
        for line in cutlass.range_constexpr(dims // LINE_DIMS):
            left = four_dims(acc, 2 * line, h)
            right = four_dims(acc, 2 * line + 1, h)
            got = [
                cute.arch.shuffle_sync_bfly(left[i] if is_next else right[i], 4) for i in range(4)
            ]
            of_row = [got[i] if is_next else left[i] for i in range(4)]
            of_next = [right[i] if is_next else got[i] for i in range(4)]
            add4_if(key, row + line * LINE_DIMS, of_row)
            add4_if(next_key, next_row + line * LINE_DIMS, of_next)


@cute.jit
def multiply_item(
    role: Multiply, item: Item, items: Int32, tiles_before: Int32, last: cutlass.Constexpr
) -> None:
    """Multiply the warpgroup's tiles of an item.

    Args:
        items: the CTA's items with keys before this one. tiles_before: all their tiles.
    """
    plan = role.ctx.plan
    dims = plan.last_dims if last else plan.slice_dims
    tile = (role.warpgroup - tiles_before) & (WARPGROUPS - 1)
    if tile >= item.tiles:
        # No tile for this warpgroup: it does not need the rows, once they have come.
        for part in cutlass.range_constexpr(PARTS):
            role.ctx.memory.rows_full.wait_round(items, part)
            arrive_warp(role.ctx.memory.rows_free, part, role.ctx.thread)
    begin = first_tile(role.ctx, item)
    keys = read_keys(role, item, begin, tile)
    opens = Boolean(True)
    while tile < item.tiles:
        ahead = read_keys(role, item, begin, tile + WARPGROUPS)
        number = (tiles_before + tile) * PARTS
        acc = cute.make_rmem_tensor(dims // 2, Float32)
        closes = tile + WARPGROUPS >= item.tiles
        multiply_tile(role, acc, Tile(number, items, opens, closes), last)
        add_tile(role.dkv.iterator + item.slice * plan.slice_dims, acc, keys, dims, plan)
        keys = ahead
        opens = Boolean(False)
        tile += WARPGROUPS


@cute.jit
def multiply_all(role: Multiply) -> None:
    """Multiply every item of the CTA."""
    ctx = role.ctx
    items, tiles, item_number = Int32(0), Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        if item.tiles > 0:
            if item.slice == ctx.plan.slices - 1:
                multiply_item(role, item, items, tiles, True)
            else:
                multiply_item(role, item, items, tiles, False)
            items += 1
        tiles += item.tiles
        item_number += ctx.work.num_ctas
