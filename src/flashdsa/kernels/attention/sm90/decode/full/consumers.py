"""Roles consumer0 and consumer1: S and P of a tile each, half of O's dims, staged for the cluster.

Each half of a bf16 row of O that is staged has a scale of its own, a power of two, which makes its
largest number one from 2^14 to 2^15; packed rows have no values that are too large.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.fragments import (
    BLOCK_DIMS,
    F16_KIND,
    MMA_ROWS,
    THREAD_ROWS,
    pack,
    quad_reduce,
    row_of_thread,
)
from flashdsa.dsl.pipeline import arrive_warp
from flashdsa.dsl.smem import store_float
from flashdsa.dsl.warp_matrix import store_matrices
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.consumers import (
    Registers,
    add_tile0,
    add_tile1,
    compute_scores,
    compute_scores_in_loop,
    finish_scores,
    issue_others,
    issue_scores,
    merge_sums,
    new_registers,
    p_of,
    values_of,
    wait_for_scores,
)
from flashdsa.kernels.attention.sm90.core.results import STAGED_BYTES, WARPS, store_rows
from flashdsa.kernels.attention.sm90.core.softmax import Rows, multiply_rows
from flashdsa.kernels.attention.sm90.core.tile import FP32, TILES
from flashdsa.kernels.attention.sm90.decode.full.query import take_query, unscale
from flashdsa.kernels.attention.sm90.decode.shared.combine import (
    ask_sinks,
    factors_of_rows,
    rows_of_thread,
)
from flashdsa.kernels.attention.sm90.decode.shared.context import (
    Context,
    Output,
    steps_of,
    takes_part,
    wait_for_extent,
)
from flashdsa.kernels.attention.sm90.decode.shared.exchange import expect_parts, staged_rows
from flashdsa.kernels.attention.sm90.decode.shared.plan import (
    CTA_STATISTICS_BYTES,
    GROUP_BYTES,
    STATISTICS_BYTES,
)
from flashdsa.kernels.attention.sm90.decode.shared.words import (
    BIAS,
    TOP_EXPONENT,
    bits_of,
    power_of_two,
    store_pair,
)

MOST_POWER = 100


@cute.jit
def consume0(w: Output) -> None:
    """Take every step of the CTA, and stage half of its O."""
    ctx = w.ctx
    tile = ctx.plan.tile
    r = new_registers(tile)
    take_query(ctx, 0)
    num_tiles = wait_for_extent(ctx)
    if num_tiles > 0:
        scores_of_tile(ctx, r.s, Int32(0), 0)
        finish_scores(ctx, Int32(0), 0)
        for step in cutlass.range(steps_of(num_tiles), unroll=1):
            take_step(w, r, step, num_tiles - step * TILES)
    else:
        r.out.fill(0.0)
    end_item(w, r, 0)


@cute.jit
def scores_of_tile(ctx: Context, s: cute.Tensor, step: Int32, consumer: cutlass.Constexpr) -> None:
    """Compute S of the consumer's tile, by the code that takes the plan less time."""
    tile = ctx.plan.tile
    if cutlass.const_expr(ctx.plan.scores_in_loop):
        compute_scores_in_loop(ctx, s, step, consumer)
    elif cutlass.const_expr(consumer == 0):
        issue_scores(ctx, s, step, True, tile.low_slices + tile.high_slices)
        warpgroup.wait_group(0)
    else:
        compute_scores(ctx, s, step)


@cute.jit
def take_step(w: Output, r: Registers, step: Int32, num_tiles: Int32) -> None:
    """Take a step after its S; S of the next one is issued after the products.

    Args:
        num_tiles: from this step on. 1: the step has no tile 1.
    """
    ctx = w.ctx
    tile = ctx.plan.tile
    v0, v1 = values_of(ctx, 0, 0), values_of(ctx, 1, 0)
    if cutlass.const_expr(ctx.plan.packed):
        unscale(ctx, r.s)
    add_tile0(ctx, r, w.scale, v0, step)
    if num_tiles > 1:
        ctx.memory.p1_full.wait(ctx.phase(step))
        issue_others(ctx, r, w.scale, 1, p_of(ctx, 1), v1)
        if num_tiles > TILES:
            issue_scores(ctx, r.s, step + 1, True, tile.low_slices)
            warpgroup.wait_group(1)
            arrive_warp(ctx.memory.low_free, 1, ctx.thread)
            issue_scores(ctx, r.s, step + 1, True, tile.high_slices)
            warpgroup.wait_group(0)
            finish_scores(ctx, step + 1, 0)
        else:
            warpgroup.wait_group(0)


@cute.jit
def consume1(w: Output) -> None:
    """Take every step of the CTA; its softmax runs during the product with P of tile 0."""
    ctx = w.ctx
    v1 = values_of(ctx, 1, 1)
    r = new_registers(ctx.plan.tile)
    take_query(ctx, 1)
    num_tiles = wait_for_extent(ctx)
    if num_tiles > 0:
        for step in cutlass.range(num_tiles // TILES, unroll=1):
            wait_for_scores()
            scores_of_tile(ctx, r.s, step, 1)
            finish_scores(ctx, step, 1)
            issue_tile0(w, r, step)
            if cutlass.const_expr(ctx.plan.packed):
                unscale(ctx, r.s)
            add_tile1(ctx, r, w.scale, v1)
        if num_tiles % TILES != 0:
            # The CTA's last step has a tile 0 only. A branch in the loop would cost registers.
            wait_for_scores()
            issue_tile0(w, r, num_tiles // TILES)
            warpgroup.wait_group(0)
    else:
        r.out.fill(0.0)
    end_item(w, r, 1)


@cute.jit
def issue_tile0(w: Output, r: Registers, step: Int32) -> None:
    """Consumer 1: issue the product with P of tile 0."""
    ctx = w.ctx
    ctx.memory.p0_full.wait(ctx.phase(step))
    issue_others(ctx, r, w.scale, 0, p_of(ctx, 0), values_of(ctx, 0, 1), step)


@cute.jit
def end_item(w: Output, r: Registers, consumer: cutlass.Constexpr) -> None:
    """Stage a consumer's half of O for the cluster, and what its CTAs must know of it; or write its
    rows, of a CTA alone."""
    ctx = w.ctx
    asked: Any = ask_sinks(w, rows_of_thread(w)) if ctx.plan.alone else None
    if cutlass.const_expr(not ctx.plan.alone):
        # The CTAs of the cluster have initialised their barriers: none was sent anything before.
        # All rows of this CTA have come: compute-sanitizer's racecheck lets nobody pass until all
        # threads that arrived are here or have ended, those of the gather among them.
        cute.arch.cluster_wait()
    # Both consumers have read their last keys when it returns.
    sums = merge_sums(ctx, r.rows, w.scale, Int32(0), consumer)
    if cutlass.const_expr(ctx.plan.alone):
        write_rows(w, r, sums, asked, consumer)
    else:
        if takes_part(ctx):
            announce(w, consumer)
        factors, units = normalise(ctx, r.out, sums)
        multiply_rows(r.out, factors)
        stage_share(w, r, sums, units, consumer)


@cute.jit
def announce(w: Output, consumer: cutlass.Constexpr) -> None:
    """Announce that this CTA reads neither keys nor Q any more; one thread expects what the others
    will send.

    The other consumer's sums have come.
    """
    if cutlass.const_expr(consumer == 0):
        # sums0_full: the other warps of this consumer do not read them either.
        w.ctx.memory.sums0_full.wait(0)
        expect_parts(w)


@cute.jit
def stage_share(
    w: Output,
    r: Registers,
    sums: list[Float32],
    units: list[Float32],
    consumer: cutlass.Constexpr,
) -> None:
    """Stage this consumer's half of O, and its statistics."""
    stage_dims(w, r.out, consumer)
    stage_statistics(w.ctx, r.rows, sums, units, consumer)
    # The bulk copies read what threads have staged.
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def write_rows(
    w: Output,
    r: Registers,
    sums: list[Float32],
    asked: list[Int32],
    consumer: cutlass.Constexpr,
) -> None:
    """Write this consumer's half of the item's rows, of a CTA alone, staged where keys were."""
    ctx = w.ctx
    item = rows_of_thread(w)
    factors = factors_of_rows(w, r.rows, sums, item, asked, consumer)
    # sums0_full, sums1_full: no warp of either consumer reads keys any more.
    (ctx.memory.sums0_full, ctx.memory.sums1_full)[consumer].wait(0)
    warp_bytes = ctx.plan.tile.half_dims // BLOCK_DIMS * STAGED_BYTES
    warp = consumer * WARPS + ctx.thread // WARP_SIZE
    staged = ctx.memory.k.address() + warp * warp_bytes
    store_rows(ctx, w.out, r.out, factors, item, consumer, staged, STAGED_BYTES)


@cute.jit
def normalise(
    ctx: Context, out: cute.Tensor, sums: list[Float32]
) -> tuple[list[Float32], list[Float32]]:
    """The factors that divide O by the CTA's own sums, 0 of a row without a key, and scale it; and
    the scales that undo the latter."""
    factors, units = [], []
    for h in cutlass.range_constexpr(THREAD_ROWS):
        factor = cute.arch.rcp_approx(sums[h]) if sums[h] != 0.0 else Float32(0.0)
        unit = Float32(1.0)
        if cutlass.const_expr(not ctx.plan.packed):
            top = Float32(0.0)
            for i in [i for i in range(cute.size(out)) if i // 2 % THREAD_ROWS == h]:
                top = cute.arch.fmax(top, cute.math.absf(out[i]))
            exponent = (bits_of(quad_reduce(top * factor, cute.arch.fmax)) >> 23) - BIAS
            power = cutlass.min(TOP_EXPONENT - exponent, Int32(MOST_POWER))
            factor = factor * power_of_two(power)
            unit = power_of_two(-power)
        factors.append(factor)
        units.append(unit)
    return factors, units


@cute.jit
def stage_dims(w: Output, out: cute.Tensor, consumer: cutlass.Constexpr) -> None:
    """Stage this consumer's groups of dims: an 8x8 matrix is a group's 16 bytes of eight rows."""
    ctx = w.ctx
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    count = staged_rows(w)
    half_groups = ctx.plan.dim_groups // 2
    if warp * MMA_ROWS < count:
        row = warp * MMA_ROWS + lane // 8 % 2 * 8 + lane % 8
        group = consumer * half_groups + lane // 16
        to = ctx.memory.k.address() + (ctx.plan.staged_at + (group * count + row) * GROUP_BYTES)
        for pair in cutlass.range_constexpr(half_groups // 2):
            words = [
                pack(out[8 * pair + 2 * i], out[8 * pair + 2 * i + 1], F16_KIND) for i in range(4)
            ]
            store_matrices(to, words)
            to = to + 2 * count * GROUP_BYTES


@cute.jit
def stage_statistics(
    ctx: Context, rows: Rows, sums: list[Float32], units: list[Float32], consumer: cutlass.Constexpr
) -> None:
    """Write this CTA's maxima and sums, and this half's scales, to the CTA's offset among all
    CTAs'."""
    row = row_of_thread(ctx.thread)
    if ctx.thread % 4 == 0:
        for h in cutlass.range_constexpr(THREAD_ROWS):
            to = ctx.memory.q.address() + (
                ctx.rank * CTA_STATISTICS_BYTES + (row + 8 * h) * STATISTICS_BYTES
            )
            if cutlass.const_expr(consumer == 0):
                store_pair(to, rows.out_max[h], sums[h])
            store_float(to + (2 + consumer) * FP32, units[h])
