"""dKV += dS^T Q + P^T dO from the workspace: a CTA takes a slice of the dims of a group at a time.

Q and dO of the group's rows stay in shared memory for all of the list's tiles of 64 keys.

rows                | matrices           | multiply, even tiles      | odd tiles
------------------- | ------------------ | ------------------------- | --------------------------
Q and dO, in parts  | dS, P of tile 0    |                           |
                    | dS, P of tile 1    | products of tile 0        |
                    | dS, P of tile 2    | additions to dKV          | products of tile 1
                    | ...                | products of tile 2        | additions to dKV
next item's parts   |                    | last tile frees the parts | ...

Role matrices brings P and dS of every tile from the workspace. Role rows brings the item's dims of
Q and dO of the group's rows, each warp 64 of them. Role multiply: each warpgroup has every other
tile. A row of the tile's dKV is a key's, so the sum over all rows of the group is in one
accumulator, and each key's row of dKV is added to once for all of them.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl import cp_async, fragments, gmem, grids, pipeline, registers, tma, wgmma
from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.warp import lowest_bit
from flashdsa.hw import SM90, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.mend import flat
from flashdsa.kernels.attention.sm90.bwd_grouped import items as work_items
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv import plan as sizes
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import (
    DS_MATRIX,
    MATRICES,
    P_MATRIX,
    ROW_BLOCKS,
)
from flashdsa.kernels.attention.sm90.core import backward
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, ROWS
from flashdsa.plan.row_tiles import ROW_BYTES


@cute.jit
def first_tile(ctx: work_items.Context, item: work_items.Item) -> Int32:
    """First tile of the item's list, which goes round: lists are in order of the keys, so groups
    that run at the same time and have much in common would else add to the same rows."""
    at_once = cutlass.max(ctx.work.num_ctas // ctx.plan.slices, Int32(1))
    return item.local % at_once * item.tiles // at_once


@cute.jit
def tile_at(item: work_items.Item, first: Int32, number: Int32) -> Int32:
    """Tile of the list that the item takes as number `number`; after the last: item.tiles."""
    tile = first + number
    if tile >= item.tiles:
        tile -= item.tiles
    if number >= item.tiles:
        tile = item.tiles
    return tile


class Matrices(NamedTuple):
    """Fills the ring. Signals matrix_full."""

    ctx: work_items.Context
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
            work_items.matrix_at(keys, role.workspace, first + block, tile, P_MATRIX)
            for block in range(ROW_BLOCKS)
        ]
        for _ in cutlass.range(item.tiles, unroll=1):
            slot, announced = free.state(number), full.state(number)
            for part in cutlass.range_constexpr(sizes.PARTS):
                at = slot.in_turn(part, sizes.PARTS)
                stage = announced.in_turn(part, sizes.PARTS).stage
                matrix = P_MATRIX if part % MATRICES else DS_MATRIX
                source = sources[part // MATRICES] + matrix * keys.p_bytes
                # matrix_free: the matrix that lay in the slot has been read.
                pipeline.RingProducer(full, free).acquire(at)
                full.arrive_and_expect_tx(None, stage)
                tma.load_bytes(ring + at.stage * keys.p_bytes, source, keys.p_bytes, full.at(stage))
            tile += 1
            step = Int32(MATRICES * keys.p_bytes)
            if tile == item.tiles:
                tile = Int32(0)
                step -= item.tiles * (MATRICES * keys.p_bytes)
            sources = [source + step for source in sources]
            number += sizes.PARTS
        item_number += ctx.work.num_ctas


class Rows(NamedTuple):
    """Fills rows. Signals rows_full."""

    ctx: work_items.Context
    q: cute.Tensor  # (S * H, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16
    present: cute.Tensor  # (groups,) int32
    heads: Int32  # 8, 16, ..., 128


@cute.jit
def copy_part(role: Rows, item: work_items.Item, present: Int32, part: cutlass.Constexpr) -> None:
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
    at = source.iterator + (first_row * dims + first_dim + lane * backward.WORD_DIMS)
    to = ctx.memory.rows.address() + part * plan.part_bytes + chunk * (ROWS * ROW_BYTES)
    to = to + backward.place_of_word(lane)
    if first_dim < dims:
        for rows in cutlass.range_constexpr(ROWS // backward.QUERY_ROWS):
            query = (block * ROWS + rows * backward.QUERY_ROWS) >> log2_heads
            none = ((present >> query) & 1) - 1
            for line in cutlass.range_constexpr(backward.QUERY_ROWS):
                # The swizzle of row `line` of eight: its number into bits 4 to 6.
                row = rows * backward.QUERY_ROWS + line
                offset = row * dims * BF16
                cp_async.copy_word(to ^ (line << 4), at, none, row * ROW_BYTES, offset)


@cute.jit
def copy_all(role: Rows) -> None:
    """All warps of the role: copy Q and dO of the CTA's items that have keys, part by part."""
    ctx = role.ctx
    items, item_number = Int32(0), ctx.work.first
    while item_number < ctx.work.num_items:
        item = ctx.item(item_number)
        if item.tiles > 0:
            present = (role.present.iterator + item.group).load()
            for part in cutlass.range_constexpr(sizes.PARTS):
                # rows_free: no tile of the item before needs the part.
                ctx.memory.rows_free.wait_round(items - 1, part)
                copy_part(role, item, present, part)
                cp_async.arrive_when_copied(ctx.memory.rows_full.at(part))
            items += 1
        item_number += ctx.work.num_ctas


MATRIX_STEP = fragments.MMA_K * BF16
"""Bytes from 16 rows of a matrix, where they are along its lines, to the next ones."""
ROWS_STEP = fragments.MMA_K * ROW_BYTES
"""Bytes from 16 rows of Q or dO to the next ones."""
KEYS = 2
"""Rows of the tile in a thread, 8 apart."""
LINE_DIMS = 2 * backward.PAIR_DIMS
"""Dims of a line: 128 bytes of dKV, which eight lanes add in one piece; pieces of 64 bytes take the
kernel 9 % longer."""


class Multiply(NamedTuple):
    """Reads rows and the ring. Signals rows_free, matrix_free; adds to dKV."""

    ctx: work_items.Context
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
    """This warp has read the part's matrix, and after the item's last tile the part's rows."""
    ctx = role.ctx
    free = ctx.memory.matrix_free
    cute.arch.sync_warp()
    if ctx.thread % WARP_SIZE == 0:
        free.arrive(free.state(tile.first_matrix + part).stage)
        if tile.closes:
            ctx.memory.rows_free.arrive(part)


@cute.jit
def multiply_tile(role: Multiply, acc: Any, tile: Tile, last: cutlass.Constexpr) -> None:
    """Compute all products of a tile; `last`: of the last slice: dO has no RoPE dims."""
    ctx, plan = role.ctx, role.ctx.plan
    full = ctx.memory.matrix_full
    ring, rows = ctx.memory.ring.address(), ctx.memory.rows.address()
    dims = plan.last_dims if last else plan.slice_dims
    for part in cutlass.range_constexpr(sizes.PARTS):
        number = tile.first_matrix + part
        if tile.opens:
            ctx.memory.rows_full.wait_round(tile.items, part)
            # The rows have been copied by threads; the fence shows them to wgmma.
            cute.arch.fence_proxy("async.shared", space="cta")
        full.wait_for(number)
        slot = ctx.memory.matrix_free.state(number).stage
        warpgroup.fence()
        backward.multiply(
            acc,
            plan.last_value_dims if last and part % MATRICES else dims,
            (wgmma.along_k(ring + slot * plan.tile.p_bytes), MATRIX_STEP),
            (wgmma.along_n(rows + part * plan.part_bytes), ROWS_STEP),
            transposed=False,
            clear=part == 0,
        )
        warpgroup.commit_group()
        if cutlass.const_expr(part > 0):
            warpgroup.wait_group(1)
            release(role, tile, part - 1)
    warpgroup.wait_group(0)
    release(role, tile, sizes.PARTS - 1)


@cute.jit
def read_keys(role: Multiply, item: work_items.Item, begin: Int32, number: Int32) -> list[Int32]:
    """Rows of dKV for this thread's rows of a tile that may not exist; -1 after the list's end.
    `begin`: the item's first tile. `number`: of the tile among the item's."""
    ctx = role.ctx
    keys = [Int32(-1)] * KEYS
    first = (
        tile_at(item, begin, number) * ctx.plan.tile.keys
        + ctx.thread // WARP_SIZE * fragments.MMA_ROWS
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
    dim = lane // 4 % 2 * backward.PAIR_DIMS + lane % 4 * 4
    for h in cutlass.range_constexpr(KEYS):
        others = cute.arch.shuffle_sync_bfly(keys[h], 4)
        key, next_key = (others if is_next else keys[h]), (keys[h] if is_next else others)
        row = dkv + (Int64(key) * plan.tile.d_qk + dim)
        next_row = dkv + (Int64(next_key) * plan.tile.d_qk + dim)
        for line in cutlass.range_constexpr(dims // LINE_DIMS):
            left = backward.four_dims(acc, 2 * line, h)
            right = backward.four_dims(acc, 2 * line + 1, h)
            got = [
                cute.arch.shuffle_sync_bfly(left[i] if is_next else right[i], 4) for i in range(4)
            ]
            of_row = [got[i] if is_next else left[i] for i in range(4)]
            of_next = [right[i] if is_next else got[i] for i in range(4)]
            gmem.add4_if(key, row + line * LINE_DIMS, of_row)
            gmem.add4_if(next_key, next_row + line * LINE_DIMS, of_next)


@cute.jit
def multiply_item(
    role: Multiply,
    item: work_items.Item,
    items: Int32,
    tiles_before: Int32,
    last: cutlass.Constexpr,
) -> None:
    """Multiply the warpgroup's tiles of an item. `items`: the CTA's items with keys before this
    one. `tiles_before`: all their tiles."""
    plan = role.ctx.plan
    dims = plan.last_dims if last else plan.slice_dims
    tile = (role.warpgroup - tiles_before) & (sizes.WARPGROUPS - 1)
    if tile >= item.tiles:
        # No tile for this warpgroup: it does not need the rows, once they have come.
        for part in cutlass.range_constexpr(sizes.PARTS):
            role.ctx.memory.rows_full.wait_round(items, part)
            pipeline.arrive_warp(role.ctx.memory.rows_free, part, role.ctx.thread)
    begin = first_tile(role.ctx, item)
    keys = read_keys(role, item, begin, tile)
    opens = Boolean(True)
    while tile < item.tiles:
        ahead = read_keys(role, item, begin, tile + sizes.WARPGROUPS)
        number = (tiles_before + tile) * sizes.PARTS
        acc = cute.make_rmem_tensor(dims // 2, Float32)
        closes = tile + sizes.WARPGROUPS >= item.tiles
        multiply_tile(role, acc, Tile(number, items, opens, closes), last)
        add_tile(role.dkv.iterator + item.slice * plan.slice_dims, acc, keys, dims, plan)
        keys = ahead
        opens = Boolean(False)
        tile += sizes.WARPGROUPS


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


class Operands(NamedTuple):
    """Arguments of every launch, in order; see workspace.py."""

    workspace: cute.Tensor  # (row blocks, bytes) uint8: of the groups of the launch
    ids: cute.Tensor  # (groups, capacity) int32
    counts: cute.Tensor  # (groups,) int32
    present: cute.Tensor  # (groups,) int32
    q: cute.Tensor  # (S, H, 576) bf16
    do: cute.Tensor  # (S, H, 512) bf16
    dkv: cute.Tensor  # (S_kv, 576) fp32, added to
    heads: Int32  # H, one of HEADS


@cute.kernel
def dkv_kernel(x: Operands, groups: work_items.Groups, plan: cutlass.Constexpr):
    """One CTA; `x`: with the heads' rows of q and do one after another."""
    thread, _, _ = cute.arch.thread_idx()
    memory = Memory.begin(plan)
    grids.follow_grid()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    group = warp // (WARPGROUP_SIZE // WARP_SIZE)
    # Each role computes its own coordinates: values shared by all would be live in every role.
    if group == 0:
        registers.take_registers(plan, "rows")
        ctx = work_items.locate(memory, x.ids, x.counts, groups)
        if warp == 0:
            if thread == 0:
                load_matrices(Matrices(ctx, x.workspace))
        elif warp <= sizes.ROW_WARPS:
            copy_all(Rows(ctx, x.q, x.do, x.present, x.heads))
    else:
        registers.take_registers(plan, "multiply")
        ctx = work_items.locate(memory, x.ids, x.counts, groups)
        multiply_all(Multiply(ctx, x.dkv, group - 1))


@cute.jit
def launch_dkv(plan: cutlass.Constexpr, stream: Any, *arguments: Any):
    """Launch on `stream`. `arguments`: those of `Operands`, those of `Groups`, and num_ctas: at
    most the work items, plan.slices a group; best as many as run at once."""
    last = len(Operands._fields)
    *before, num_ctas = arguments
    given, groups = Operands(*before[:last]), work_items.Groups(*before[last:])
    x = given._replace(q=flat(given.q, plan.tile.d_qk), do=flat(given.do, plan.tile.d_v))
    grids.launch_plan(dkv_kernel(x, groups, plan), plan, num_ctas, stream)


def compile_dkv(plan: sizes.DkvPlan) -> Any:
    """Compile `launch_dkv`."""
    blocks, block_bytes, groups, capacity, keys, queries, heads, choices = fake.symbols(8)
    rows = fake.bf16(queries, heads, plan.tile.d_qk), fake.bf16(queries, heads, plan.tile.d_v)
    dkv = fake.fake_tensor(Float32, (keys, plan.tile.d_qk))
    lists = fake.words(groups, capacity), fake.words(groups), fake.words(groups)
    workspace = fake.fake_tensor(Uint8, (blocks, block_bytes))
    x = Operands(workspace, *lists, *rows, dkv, Int32(128))
    of_groups = work_items.Groups(Int32(0), Int32(1), fake.words(choices), Int32(0))
    return compile_launch(SM90, launch_dkv, plan, *x, *of_groups, Int32(1))
