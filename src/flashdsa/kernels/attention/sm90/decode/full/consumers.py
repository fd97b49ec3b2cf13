"""Roles consumer0 and consumer1: S and P of a tile each, half of O's dims, staged for the cluster.

Each half of a bf16 row of O that is staged has a scale of its own, a power of two, which makes its
largest number one from 2^14 to 2^15; packed rows have no values that are too large.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.fragments import (
    BLOCK_DIMS,
    F16_KIND,
    MMA_ROWS,
    THREAD_ROWS,
    pack,
    quad_reduce,
    row_of_thread,
)
from flashdsa.dsl.smem import store_float
from flashdsa.dsl.warp_matrix import store_matrices
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.consumers import Registers, merge_sums, new_registers
from flashdsa.kernels.attention.sm90.core.results import (
    STAGED_BYTES,
    WARPS,
    ask_sinks,
    factors_of_rows,
    store_rows,
)
from flashdsa.kernels.attention.sm90.core.softmax import Rows, multiply_rows
from flashdsa.kernels.attention.sm90.core.tile import FP32
from flashdsa.kernels.attention.sm90.decode.full.gather import NOTHING
from flashdsa.kernels.attention.sm90.decode.full.query import take_query
from flashdsa.kernels.attention.sm90.decode.full.steps import take_tiles0, take_tiles1
from flashdsa.kernels.attention.sm90.decode.shared.combine import rows_of_thread
from flashdsa.kernels.attention.sm90.decode.shared.context import (
    Context,
    Output,
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
    r = new_registers(w.ctx.plan.tile)
    take_query(w.ctx, 0)
    take_tiles0(w.ctx, r, w.scale, NOTHING, wait_for_extent(w.ctx))
    end_item(w, r, 0)


@cute.jit
def consume1(w: Output) -> None:
    """Likewise, the other half."""
    r = new_registers(w.ctx.plan.tile)
    take_query(w.ctx, 1)
    num_tiles = wait_for_extent(w.ctx)
    if num_tiles > 0:
        take_tiles1(w.ctx, r, w.scale, NOTHING, num_tiles)
    else:
        r.out.fill(0.0)
    end_item(w, r, 1)


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
