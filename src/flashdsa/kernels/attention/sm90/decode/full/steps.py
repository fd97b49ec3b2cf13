"""Steps of both consumers: of a CTA's share of an item, or of a stretch of dealt tiles.

A dealt kernel has further stretches: it tells when their Q may come, and frees every tile.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.pipeline import arrive_warp
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.consumers import (
    Registers,
    add_tile0,
    add_tile1,
    compute_next_scores,
    compute_scores,
    compute_scores_in_loop,
    finish_scores,
    issue_others,
    issue_scores,
    p_of,
    values_of,
    wait_for_scores,
)
from flashdsa.kernels.attention.sm90.core.softmax import Scale
from flashdsa.kernels.attention.sm90.core.tile import TILES
from flashdsa.kernels.attention.sm90.decode.full.gather import Before
from flashdsa.kernels.attention.sm90.decode.full.query import unscale
from flashdsa.kernels.attention.sm90.decode.shared.context import Context, steps_of


@cute.jit
def take_tiles0(ctx: Context, r: Registers, scale: Scale, before: Before, num_tiles: Int32) -> None:
    """Consumer 0: take `num_tiles` tiles."""
    if num_tiles > 0:
        first = before.use(0, 0)
        scores_of_tile(ctx, r.s, first, 0)
        finish_scores(ctx, first, 0)
        free_query(ctx, num_tiles <= TILES)
        for step in cutlass.range(steps_of(num_tiles), unroll=1):
            take_step(ctx, r, scale, before, step, num_tiles - step * TILES)
    else:
        if cutlass.const_expr(ctx.plan.dealt):
            free_query(ctx, Boolean(True))
        else:
            r.out.fill(0.0)


@cute.jit
def scores_of_tile(ctx: Context, s: cute.Tensor, use: Int32, consumer: cutlass.Constexpr) -> None:
    """Compute S of the consumer's tile, by the code that takes the plan less time."""
    tile = ctx.plan.tile
    if cutlass.const_expr(ctx.plan.scores_in_loop):
        compute_scores_in_loop(ctx, s, use, consumer)
    elif cutlass.const_expr(consumer == 0):
        issue_scores(ctx, s, use, True, tile.low_slices + tile.high_slices)
        warpgroup.wait_group(0)
    else:
        compute_scores(ctx, s, use)


def adds_to_others(ctx: Context, step: Any) -> Any:
    """Whether O has a product before a step's first one; of dealt tiles it is 0 before."""
    return True if ctx.plan.dealt else step


@cute.jit
def take_step(
    ctx: Context, r: Registers, scale: Scale, before: Before, step: Int32, num_tiles: Int32
) -> None:
    """Consumer 0: take a step after its S; S of the next one is issued after the products.

    Args:
        num_tiles: from this step on. 1: the step has no tile 1.
    """
    v0, v1 = values_of(ctx, 0, 0), values_of(ctx, 1, 0)
    if cutlass.const_expr(ctx.plan.packed):
        unscale(ctx, r.s)
    add_tile0(ctx, r, scale, v0, adds_to_others(ctx, step))
    if num_tiles > 1:
        ctx.memory.p1_full.wait(ctx.phase(before.use(1, step)))
        issue_others(ctx, r, scale, 1, p_of(ctx, 1), v1)
        if num_tiles > TILES:
            following = before.use(0, step + 1)
            compute_next_scores(ctx, r.s, following, True)
            finish_scores(ctx, following, 0)
            free_query(ctx, num_tiles <= 2 * TILES)
        else:
            warpgroup.wait_group(0)
            if cutlass.const_expr(ctx.plan.dealt):
                arrive_warp(ctx.memory.low_free, 1, ctx.thread)


@cute.jit
def take_tiles1(ctx: Context, r: Registers, scale: Scale, before: Before, num_tiles: Int32) -> None:
    """Consumer 1: take `num_tiles` tiles; its softmax runs during the product with P of tile 0."""
    v1 = values_of(ctx, 1, 1)
    free_query(ctx, num_tiles < TILES)
    for step in cutlass.range(num_tiles // TILES, unroll=1):
        wait_for_scores()
        scores_of_tile(ctx, r.s, before.use(1, step), 1)
        finish_scores(ctx, before.use(1, step), 1)
        free_query(ctx, num_tiles - step * TILES < 2 * TILES)
        issue_tile0(ctx, r, scale, before, step)
        if cutlass.const_expr(ctx.plan.packed):
            unscale(ctx, r.s)
        add_tile1(ctx, r, scale, v1)
    if num_tiles % TILES != 0:
        # The last step has a tile 0 only. A branch in the loop would cost registers.
        wait_for_scores()
        issue_tile0(ctx, r, scale, before, num_tiles // TILES)
        warpgroup.wait_group(0)
        if cutlass.const_expr(ctx.plan.dealt):
            arrive_warp(ctx.memory.high_free, 0, ctx.thread)


@cute.jit
def issue_tile0(ctx: Context, r: Registers, scale: Scale, before: Before, step: Int32) -> None:
    """Consumer 1: issue the product with P of tile 0."""
    ctx.memory.p0_full.wait(ctx.phase(before.use(0, step)))
    p0, v0 = p_of(ctx, 0), values_of(ctx, 0, 1)
    issue_others(ctx, r, scale, 0, p0, v0, adds_to_others(ctx, step))


@cute.jit
def free_query(ctx: Context, is_last: Boolean) -> None:
    """Announce, after the last scores of a stretch of dealt tiles, that this warp reads neither
    its Q nor its extent any more."""
    if cutlass.const_expr(ctx.plan.dealt):
        cute.arch.sync_warp()
        if ctx.thread % WARP_SIZE == 0 and is_last:
            ctx.memory.q_free.arrive()
