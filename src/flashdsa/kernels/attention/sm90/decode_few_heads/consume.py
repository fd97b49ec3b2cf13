"""Role math: each consumer takes every other tile of the CTA's, and has an O of its own."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.fragments import MMA_ROWS
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.pipeline import PipelineState, RingConsumer
from flashdsa.dsl.wgmma import along_k
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.decode.context import Context, Output, wait_for_extent
from flashdsa.kernels.attention.sm90.decode_few_heads.plan import GROUPS, PIECE_BYTES, TILE_PIECES
from flashdsa.kernels.attention.sm90.decode_few_heads.products import (
    BLOCKS,
    multiply_tile,
    multiply_values,
)
from flashdsa.kernels.attention.sm90.decode_few_heads.query import take_query
from flashdsa.kernels.attention.sm90.decode_few_heads.ring import state_of_piece, tiles_of_consumer
from flashdsa.kernels.attention.sm90.decode_few_heads.softmax import (
    Heads,
    exponentiate,
    find_tops,
    first_head,
    head_of,
    mask_keys,
    move_tops,
    new_heads,
    offset_of_head,
    store_p,
)
from flashdsa.problem import KV_ROW_BYTES

FIRST_MEETING = 1
"""Named barrier of the first consumer; the second one's follows."""


class Math(NamedTuple):
    """Reads q, k and masks. Writes its p, and results."""

    ctx: Context
    output: Output
    q: cute.Tensor  # (S, H, 576) bf16
    side: Int32  # 0 or 1


class Registers(NamedTuple):
    """Registers of a thread."""

    out: cute.Tensor  # O^T: 8 blocks of 64 dims, columns / 2 fp32 each
    heads: Heads


def meet(ctx: Context, side: Any) -> None:
    """Sync the four warps of a consumer."""
    cute.arch.barrier(barrier_id=FIRST_MEETING + side, number_of_threads=WARPGROUP_SIZE)


def read_units(ctx: Context) -> list[Any]:
    """Scales of the lane's heads of Q."""
    count = ctx.plan.columns // 4
    shared = ctx.arena.array("row_unit", Float32, ctx.plan.columns)
    first = first_head(ctx.thread % WARP_SIZE)
    return [shared[first + offset_of_head(number)] for number in range(count)]


def states_of_tile(role: Math, step: Int32) -> list[PipelineState]:
    """States of the consumer's pieces of a step; found again at each use, not kept in registers."""
    first = opaque(step) * TILE_PIECES
    return [state_of_piece(role.ctx.plan, role.side, first + i) for i in range(TILE_PIECES)]


@cute.jit
def take_tile(role: Math, r: Registers, step: Int32) -> None:
    """Take the tile of that step, whose pieces have come."""
    ctx = role.ctx
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    # A warp has 16 keys, of one of the pieces, as rows of S^T.
    key = warp % 2 * MMA_ROWS
    states = states_of_tile(role, step)
    stage = states[0].stage
    if warp >= 2:
        stage = states[1].stage
    piece = ctx.arena.address("k") + stage * PIECE_BYTES
    masks = ctx.arena.array("masks", Int32, ctx.plan.stages)
    q = along_k(ctx.arena.address("q"))
    keys = piece + (key + lane % 16) * KV_ROW_BYTES + lane // 16 * 16
    row = piece + (key + lane // 4) * KV_ROW_BYTES
    s = multiply_tile(ctx.plan, q, keys, row)
    scale = role.output.scale
    s = mask_keys(s, read_units(ctx), scale, masks[stage], key + lane // 4)
    # All four warps are done with P of the tile before when it returns.
    tops, largest = find_tops(ctx, s, row, role.side, meet)
    tops, factors = move_tops(ctx, r.heads, tops, largest, scale, role.side)
    rescale(ctx, r.out, factors)
    p = exponentiate(s, r.heads, tops, scale)
    of_consumer = role.side * (GROUPS * ctx.plan.operand_bytes)
    at = ctx.arena.address("p") + of_consumer
    store_p(ctx, p, row, r.heads, at)
    meet(ctx, role.side)
    columns = ctx.arena.address("k") + lane * KV_ROW_BYTES + warp * 16
    pieces = [columns + state.stage * PIECE_BYTES for state in states_of_tile(role, step)]
    multiply_values(ctx.plan, r.out, pieces, along_k(at))


@cute.jit
def rescale(ctx: Context, out: cute.Tensor, factors: list[Any]) -> None:
    """Rescale O to maxima that have moved, which is rare."""
    moved = factors[0] != 1.0
    for factor in factors[1:]:
        moved = moved | (factor != 1.0)
    if cute.arch.vote_any_sync(moved):
        for i in cutlass.range_constexpr(BLOCKS * ctx.plan.columns // 2):
            out[i] = out[i] * factors[head_of(i % (ctx.plan.columns // 2))]


@cute.jit
def consume(role: Math) -> Registers:
    """Take every step of the CTA in which this consumer has a tile."""
    ctx = role.ctx
    out = cute.make_rmem_tensor(BLOCKS * ctx.plan.columns // 2, Float32)
    out.fill(0.0)
    r = Registers(out, new_heads(ctx, role.side))
    if ctx.num_steps > 0:
        take_query(ctx, role.q, role.side)
    num_tiles = wait_for_extent(ctx)
    ring = RingConsumer(ctx.barriers("full"), ctx.barriers("free"))
    for step in cutlass.range(tiles_of_consumer(num_tiles, role.side), unroll=1):
        for state in states_of_tile(role, step):
            ring.wait(state)
        take_tile(role, r, step)
        # Bulk copies overwrite memory that threads have read.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if ctx.thread % WARP_SIZE == 0:
            for state in states_of_tile(role, step):
                ring.release(state.stage)
    return r
