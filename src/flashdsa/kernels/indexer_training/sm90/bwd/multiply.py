"""Role multiply: q k, its gradient A, dQ, dK and dW, two warpgroups over each tile.

Each has a half of the group's blocks of 64 rows, whose dQ it keeps in registers, and a half of the
dims of dK, for which it needs the images of A of all blocks. The products of dQ run while a tile's
dK is added, and while A of the next tile is computed.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.pipeline import arrive_warp
from flashdsa.dsl.warp import neighbours_sum
from flashdsa.dsl.warp_matrix import pack_bf16
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer_training.sm90.bwd.add import add_dims
from flashdsa.kernels.indexer_training.sm90.bwd.context import Context, tile_behind, tiles_of
from flashdsa.kernels.indexer_training.sm90.bwd.gate import MMA_ROWS, THREAD_ROWS, clear, gate
from flashdsa.kernels.indexer_training.sm90.bwd.plan import (
    BLOCK_BYTES,
    CHUNK,
    CHUNK_BYTES,
    FP32,
    IMAGE_BUFFERS,
    IMAGE_BYTES,
    MULTIPLIERS,
    ROWS,
    TILE_KEYS,
)
from flashdsa.kernels.indexer_training.sm90.bwd.products import (
    OF_DQ,
    OF_SCORES,
    issue_dk,
    issue_dq,
    issue_scores,
)
from flashdsa.problem import INDEX_HEAD_DIM

IMAGES_READY = 1
"""Named barrier of the role."""


class Multiplier(NamedTuple):
    """Reads q, k, gradients, rows; writes a, dQ, dK, dW. Signals k_free, q_free."""

    ctx: Context
    half: Int32  # of blocks, and of dims of dK
    weights: cute.Tensor  # (S * H,) fp32
    dq: cute.Tensor  # (S * H, 128) bf16
    dk: cute.Tensor  # (S_kv, 128) fp32; ordered: (groups * capacity, 128)
    dw: cute.Tensor  # (S * H,) fp32

    @property
    def first_block(self) -> Any:
        """This warpgroup's first block."""
        return self.half * self.ctx.plan.own_blocks


class Own(NamedTuple):
    """Values of an item that a thread keeps."""

    dq: list[Any]  # 64 fp32 of each own block
    sums: cute.Tensor  # of its rows: g relu(q k)
    weights: list[Float32]  # of its rows


class Place(NamedTuple):
    """Addresses of a tile's parts in shared memory."""

    k: Int32
    gradients: Int32
    rows: Int32
    images: Int32


@cute.jit
def place_of(ctx: Context, stage: Int32, number: Int32) -> Place:
    """Addresses of the CTA's tile of that number."""
    arena, plan = ctx.arena, ctx.plan
    return Place(
        arena.address("k") + stage * BLOCK_BYTES,
        arena.address("gradients") + stage * plan.gradient_bytes,
        arena.address("rows") + stage * (TILE_KEYS * FP32),
        arena.address("a") + number % IMAGE_BUFFERS * (plan.blocks * IMAGE_BYTES),
    )


@cute.jit
def wait_for_tile(ctx: Context, number: Int32) -> Int32:
    """Wait for a tile; return its stage."""
    ring = ctx.arena.consumer("k_full", "k_free")
    state = ring.state(number)
    # k_full[stage]: threads have copied the tile; the fence shows it to wgmma.
    ring.wait(state)
    cute.arch.fence_proxy("async.shared", space="cta")
    return state.stage


@cute.jit
def first_row(role: Multiplier, item: Int32, block: cutlass.Constexpr) -> Int32:
    """This thread's first row in an own block of the item, counted from the item's first row."""
    ctx = role.ctx
    own = ctx.thread // WARP_SIZE * MMA_ROWS + ctx.thread % WARP_SIZE // 4
    return (role.first_block + block) * ROWS + own


@cute.jit
def read_weights(role: Multiplier, item: Int32) -> list[Float32]:
    """Weights of this thread's rows; 0 of a query that has no gradient, or is past the last."""
    ctx = role.ctx
    plan = ctx.plan
    present = ctx.lists.present[item]
    weights = []
    for block in cutlass.range_constexpr(plan.own_blocks):
        for h in cutlass.range_constexpr(THREAD_ROWS):
            row = first_row(role, item, block) + 8 * h
            weight = Float32(0.0)
            if (present >> (row // plan.num_heads)) & 1 == 1:
                at = Int64(item) * (plan.blocks * ROWS) + row
                weight = (role.weights.iterator + at).load()
            weights.append(weight)
    return weights


@cute.jit
def gate_block(
    role: Multiplier, own: Own, acc: cute.Tensor, place: Place, block: cutlass.Constexpr
) -> None:
    """Compute A of an own block, and its part of dW."""
    ctx = role.ctx
    row = (role.first_block + block) * ROWS + ctx.thread // WARP_SIZE * MMA_ROWS
    gradients = place.gradients + row // ctx.plan.num_heads * (TILE_KEYS * FP32)
    image = place.images + (role.first_block + block) * IMAGE_BYTES
    gate(acc, own.weights, own.sums, image, gradients, ctx.thread, block)


@cute.jit
def publish(ctx: Context) -> None:
    """Publish both warpgroups' images: written by threads, shown to wgmma by the fence."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=IMAGES_READY, number_of_threads=MULTIPLIERS * WARPGROUP_SIZE)


@cute.jit
def start_item(role: Multiplier, own: Own, accs: Any, number: Int32) -> None:
    """Compute A of the item's first tile."""
    ctx = role.ctx
    place = place_of(ctx, wait_for_tile(ctx, number), number)
    q = ctx.arena.address("q") + role.first_block * BLOCK_BYTES
    for block in cutlass.range_constexpr(ctx.plan.own_blocks):
        issue_scores(accs[block], q + block * BLOCK_BYTES, place.k)
    for block in cutlass.range_constexpr(ctx.plan.own_blocks):
        warpgroup.wait_group(ctx.plan.own_blocks - 1 - block)
        gate_block(role, own, accs[block], place, block)
    publish(ctx)


@cute.jit
def multiply_tile(
    role: Multiplier,
    own: Own,
    accs: Any,
    to: cute.Pointer,
    number: Int32,
    last: cutlass.Constexpr,
) -> None:
    """Compute dQ and dK of the CTA's tile of that number, and A of the next one, unless it is the
    last.

    The first accumulators have q k of the next tile for the first block. The others have this
    tile's dK, and then q k for the second block.

    Args:
        to: as for `add_dims`.
    """
    ctx = role.ctx
    plan = ctx.plan
    ring = ctx.arena.consumer("k_full", "k_free")
    state = ring.state(number)
    place = place_of(ctx, state.stage, number)
    q = ctx.arena.address("q")
    own_q = q + role.first_block * BLOCK_BYTES
    image = place.images + role.first_block * IMAGE_BYTES
    scores, dk = accs
    issue_dk(dk, place.images, q + role.half * CHUNK_BYTES, plan.blocks)
    ahead = place
    if cutlass.const_expr(not last):
        ahead = place_of(ctx, wait_for_tile(ctx, number + 1), number + 1)
        issue_scores(scores, own_q, ahead.k)
    issue_dq(own.dq[0], image, place.k)
    warpgroup.wait_group(1 if last else 2)
    add_dims(to, dk, place.rows, ctx.thread, plan.ordered)
    if cutlass.const_expr(plan.own_blocks > 1):
        if cutlass.const_expr(not last):
            issue_scores(dk, own_q + BLOCK_BYTES, ahead.k)
        issue_dq(own.dq[1], image + IMAGE_BYTES, place.k)
    if cutlass.const_expr(not last):
        # Scores and dQ of each own block are in flight.
        warpgroup.wait_group(2 * plan.own_blocks - 1)
        gate_block(role, own, scores, ahead, 0)
        if cutlass.const_expr(plan.own_blocks > 1):
            warpgroup.wait_group(1)
            gate_block(role, own, dk, ahead, 1)
        publish(ctx)
    warpgroup.wait_group(0)
    ring.release(state.stage)


@cute.jit
def store_item(role: Multiplier, own: Own, item: Int32) -> None:
    """Write dQ and dW of this warpgroup's blocks. Rows past the last one are not written."""
    ctx = role.ctx
    lane = ctx.thread % WARP_SIZE
    first = Int64(item) * (ctx.plan.blocks * ROWS)
    for block in cutlass.range_constexpr(ctx.plan.own_blocks):
        for h in cutlass.range_constexpr(THREAD_ROWS):
            row = first + first_row(role, item, block) + 8 * h
            total = neighbours_sum(own.sums[THREAD_ROWS * block + h], 4)
            if row < role.dq.shape[0]:
                at = role.dq.iterator + (row * INDEX_HEAD_DIM + lane % 4 * 2)
                to = cute.recast_ptr(at, dtype=Int32)
                for eight in cutlass.range_constexpr(INDEX_HEAD_DIM // 8):
                    values = [own.dq[block][4 * eight + 2 * h + i] for i in range(2)]
                    (to + 4 * eight).store(pack_bf16(*values))
                if lane % 4 == 0:
                    (role.dw.iterator + row).store(total)


@cute.jit
def place_of_dk(role: Multiplier, item: Int32, tile: Int32) -> cute.Pointer:
    """First of this warpgroup's dims in row 0 of dK; ordered: in the row of the tile's first
    key."""
    to = role.dk.iterator + role.half * CHUNK
    if cutlass.const_expr(role.ctx.plan.ordered):
        line = Int64(item) * role.ctx.lists.rows.shape[1]
        to = to + (line + tile * TILE_KEYS) * INDEX_HEAD_DIM
    return to


@cute.jit
def multiply_all(role: Multiplier) -> None:
    """Multiply every tile of the CTA's items."""
    ctx = role.ctx
    own_blocks = ctx.plan.own_blocks
    accs = [cute.make_rmem_tensor(OF_SCORES, Float32) for _ in range(2)]
    dq = [cute.make_rmem_tensor(OF_DQ, Float32) for _ in range(own_blocks)]
    sums = cute.make_rmem_tensor(THREAD_ROWS * own_blocks, Float32)
    number, items = Int32(0), Int32(0)
    for item in cutlass.range(ctx.cta, ctx.num_items, ctx.num_ctas, unroll=1):
        tiles = tiles_of(ctx, item)
        own = Own(dq, sums, read_weights(role, item))
        for acc in dq:
            clear(acc, OF_DQ)
        clear(sums, THREAD_ROWS * own_blocks)
        if tiles.count > 0:
            # q_full: threads have copied Q; the fence shows it to wgmma.
            ctx.barriers("q_full").wait_round(items)
            cute.arch.fence_proxy("async.shared", space="cta")
            items += 1
            start_item(role, own, accs, number)
            tile = tiles.first
            for _ in cutlass.range(tiles.count - 1, unroll=1):
                multiply_tile(role, own, accs, place_of_dk(role, item, tile), number, False)
                tile = tile_behind(tile, tiles.count)
                number += 1
            multiply_tile(role, own, accs, place_of_dk(role, item, tile), number, True)
            number += 1
            arrive_warp(ctx.barriers("q_free"), 0, ctx.thread)
        store_item(role, own, item)
