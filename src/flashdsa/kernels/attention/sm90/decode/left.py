"""Role left: S and P of tile 0, and O's dims 0-255 of both tiles."""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.wgmma import along_k, along_n
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.consumers import (
    P_FREE,
    SCORES_DONE,
    arrive_warp,
    issue_scores,
)
from flashdsa.kernels.attention.sm90.core.products import (
    OF_OUT,
    OF_SCORES,
    P_WORDS,
    multiply_others,
    multiply_own,
)
from flashdsa.kernels.attention.sm90.core.softmax import (
    Rows,
    Scale,
    exponentiate,
    mask_scores,
    new_rows,
    rescale_to_others,
    rescale_to_own,
    store_p,
)
from flashdsa.kernels.attention.sm90.core.tile import (
    CHUNK_BYTES,
    CHUNKS,
    LEFT_PIECES,
    RIGHT_PIECES,
    TILE_BYTES,
    TILES,
)
from flashdsa.kernels.attention.sm90.decode.combine import stage_share
from flashdsa.kernels.attention.sm90.decode.context import (
    Context,
    Output,
    steps_of,
    wait_for_extent,
)
from flashdsa.kernels.attention.sm90.decode.query import (
    take_query,
    unscale,
)


class Left(NamedTuple):
    """Reads tile 0, the left half of tile 1, q, P of tile 1. Writes P of tile 0, and results."""

    ctx: Context
    output: Output
    scale: Scale


class Registers(NamedTuple):
    """Registers of a thread."""

    s: cute.Tensor
    p: cute.Tensor
    out: cute.Tensor
    rows: Rows


@cute.jit
def finish_scores(ctx: Context, step: Int32) -> None:
    """Announce that all of the step's S is computed: tile 1's may follow."""
    cute.arch.barrier_arrive(barrier_id=SCORES_DONE, number_of_threads=2 * WARPGROUP_SIZE)
    ctx.barriers("notes").wait(ctx.phase(step), 0)


@cute.jit
def take_step(role: Left, r: Registers, step: Int32, num_tiles: Int32) -> None:
    """Take a step after its S; S of the next one is issued after the products.

    Args:
        num_tiles: from this step on. 1: the step has no tile 1.
    """
    ctx = role.ctx
    k0 = ctx.arena.address("k")
    v0, v1 = along_n(k0), along_n(k0 + TILE_BYTES)
    if cutlass.const_expr(ctx.plan.packed):
        unscale(ctx, r.s)
    mask_scores(ctx, r.s, role.scale, 0)
    exponentiate(r.s, r.p, r.rows, role.scale, ctx.plan.lazy_log2, ctx.kind)
    # P overwrites tile 0's RoPE chunk: all four warps have their scores.
    cute.arch.barrier(barrier_id=P_FREE, number_of_threads=WARPGROUP_SIZE)
    store_p(ctx, r.p, r.rows, k0 + (CHUNKS - 1) * CHUNK_BYTES, 0)
    ctx.barriers("p0_full").arrive()
    rescale_to_own(r.out, r.rows, role.scale)
    multiply_own(r.out, r.p, v0, ctx.kind)
    warpgroup.wait_group(0)
    arrive_warp(ctx, "left_free", 0)
    if num_tiles > 1:
        ctx.barriers("p1_full").wait(ctx.phase(step))
        rescale_to_others(ctx, r.out, r.rows, role.scale, 1)
        multiply_others(r.out, along_k(ctx.arena.address("p")), v1, ctx.kind)
        if num_tiles > TILES:
            issue_scores(ctx, r.s, step + 1, True, LEFT_PIECES)
            warpgroup.wait_group(1)
            arrive_warp(ctx, "left_free", 1)
            issue_scores(ctx, r.s, step + 1, True, RIGHT_PIECES)
            warpgroup.wait_group(0)
            finish_scores(ctx, step + 1)
        else:
            warpgroup.wait_group(0)


@cute.jit
def consume_left(role: Left) -> None:
    """Take every step of the CTA, and write its share of O."""
    ctx = role.ctx
    s = cute.make_rmem_tensor(OF_SCORES, Float32)
    p = cute.make_rmem_tensor(P_WORDS, Int32)
    out = cute.make_rmem_tensor(OF_OUT, Float32)
    out.fill(0.0)
    rows = new_rows()
    take_query(ctx, 0)
    num_tiles = wait_for_extent(ctx)
    if num_tiles > 0:
        r = Registers(s, p, out, rows)
        issue_scores(ctx, s, Int32(0), True, LEFT_PIECES + RIGHT_PIECES)
        warpgroup.wait_group(0)
        finish_scores(ctx, Int32(0))
        for step in cutlass.range(steps_of(num_tiles), unroll=1):
            take_step(role, r, step, num_tiles - step * TILES)
    stage_share(role.output, out, rows, 0)
