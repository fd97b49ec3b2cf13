"""Staging of a CTA's O and statistics in its own shared memory, from which CTAs of its cluster get
them.

O is divided by the CTA's own sums and lies in f16, in groups of 8 dims: group by group 16 bytes for
each row. Each half of a bf16 row has a scale of its own, a power of two, which makes its largest
number one from 2^14 to 2^15; packed rows have no values that are too large.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.fragments import F16_KIND, MMA_ROWS, THREAD_ROWS, pack, quad_reduce, row_of_thread
from flashdsa.dsl.smem import store_float
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.products import OF_OUT
from flashdsa.kernels.attention.sm90.core.softmax import Rows, multiply_rows
from flashdsa.kernels.attention.sm90.core.tile import FP32, HALF_DIMS, ROWS
from flashdsa.kernels.attention.sm90.decode.context import Context, Output
from flashdsa.kernels.attention.sm90.decode.plan import (
    DIM_GROUPS,
    GROUP_BYTES,
    GROUP_DIMS,
    STAGED_AT,
    STATISTICS,
)

STATISTICS_BYTES = STATISTICS * FP32
OF_CTA = ROWS * STATISTICS_BYTES
"""Bytes of a CTA's statistics."""
TOP_EXPONENT = 14
BIAS = 127
MOST_POWER = 100


def rows_of_item(w: Output) -> Any:
    """Heads of the item that exist, of the plan's."""
    return cutlass.min(Int32(w.lse.shape[1]) - w.ctx.head, Int32(w.ctx.plan.group_heads))


def staged_rows(w: Output) -> Any:
    """Rows that are staged: those of every warp that has any."""
    return (rows_of_item(w) + (MMA_ROWS - 1)) // MMA_ROWS * MMA_ROWS


@cute.jit
def stage(
    w: Output, out: cute.Tensor, rows: Rows, sums: list[Float32], side: cutlass.Constexpr
) -> None:
    """Stage a consumer's half of O, and what others must know of it."""
    units = normalise(w.ctx, out, sums)
    stage_dims(w, out, side)
    stage_statistics(w.ctx, rows, sums, units, side)


@cute.jit
def normalise(ctx: Context, out: cute.Tensor, sums: list[Float32]) -> list[Float32]:
    """Divide O by the CTA's own sums, 0 of a row without a key; return the scales that O is divided
    by."""
    factors, units = [], []
    for h in cutlass.range_constexpr(THREAD_ROWS):
        factor = cute.arch.rcp_approx(sums[h]) if sums[h] != 0.0 else Float32(0.0)
        unit = Float32(1.0)
        if cutlass.const_expr(not ctx.plan.packed):
            top = Float32(0.0)
            for i in [i for i in range(OF_OUT) if i // 2 % THREAD_ROWS == h]:
                top = cute.arch.fmax(top, cute.arch.fmax(out[i], -out[i]))
            exponent = (bits_of(quad_reduce(top * factor, cute.arch.fmax)) >> 23) - BIAS
            power = cutlass.min(TOP_EXPONENT - exponent, Int32(MOST_POWER))
            factor = factor * power_of_two(power)
            unit = power_of_two(-power)
        factors.append(factor)
        units.append(unit)
    multiply_rows(out, factors)
    return units


@cute.jit
def stage_dims(w: Output, out: cute.Tensor, side: cutlass.Constexpr) -> None:
    """Stage this consumer's groups of dims: an 8x8 matrix is a group's 16 bytes of eight rows."""
    ctx = w.ctx
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    count = staged_rows(w)
    if warp * MMA_ROWS < count:
        row = warp * MMA_ROWS + lane // 8 % 2 * 8 + lane % 8
        group = side * (DIM_GROUPS // 2) + lane // 16
        to = ctx.arena.address("k") + (STAGED_AT + (group * count + row) * GROUP_BYTES)
        for pair in cutlass.range_constexpr(HALF_DIMS // GROUP_DIMS // 2):
            words = [
                pack(out[8 * pair + 2 * i], out[8 * pair + 2 * i + 1], F16_KIND) for i in range(4)
            ]
            cute.arch.inline_ptx(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[to, *words],
            )
            to = to + 2 * count * GROUP_BYTES


@cute.jit
def stage_statistics(
    ctx: Context, rows: Rows, sums: list[Float32], units: list[Float32], side: cutlass.Constexpr
) -> None:
    """Write this CTA's maxima and sums, and this half's scales, to the CTA's offset among all
    CTAs'."""
    row = row_of_thread(ctx.thread)
    if ctx.thread % 4 == 0:
        for h in cutlass.range_constexpr(THREAD_ROWS):
            to = ctx.arena.address("q") + (ctx.rank * OF_CTA + (row + 8 * h) * STATISTICS_BYTES)
            if cutlass.const_expr(side == 0):
                store_pair(to, rows.out_max[h], sums[h])
            store_float(to + (2 + side) * FP32, units[h])


def bits_of(value: Any) -> Any:
    """fp32 as a word."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def power_of_two(exponent: Any) -> Any:
    """2^exponent, a normal number, in fp32."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};",
        write_only_types=[Float32],
        read_only_args=[(exponent + BIAS) << 23],
    )


def store_pair(address: Any, first: Any, second: Any) -> None:
    """Store two fp32 to shared memory."""
    cute.arch.inline_ptx(
        "st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second]
    )
