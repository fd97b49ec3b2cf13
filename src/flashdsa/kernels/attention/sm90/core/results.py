"""Rows of O in registers, and where they go in the results."""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from flashdsa.dsl.fragments import BLOCK_DIMS, THREAD_ROWS, pack, transpose_quad
from flashdsa.kernels.attention.sm90.core.context import StepContext


class ItemRows(NamedTuple):
    """Position of an item's rows in the results, which are numbered over queries and heads."""

    first: Int64  # number of the item's first row
    count: Int32  # existing rows, of 64
    head: Int32  # of this thread's first row
    row: Int32  # this thread's first row in the item


def clear_rows(out: cute.Tensor, factors: list[Float32]) -> None:
    """Write 0 where the factor is 0: O may be NaN in these rows."""
    for i in range(cute.size(out)):
        out[i] = select(factors[i // 2 % THREAD_ROWS] == 0.0, Float32(0.0), out[i])


@cute.jit
def select(condition: Boolean, yes: Float32, no: Float32) -> Float32:
    """One of two values."""
    return yes if condition else no


@cute.jit
def store_rows(
    ctx: StepContext,
    results: cute.Tensor,
    out: cute.Tensor,
    item: ItemRows,
    consumer: cutlass.Constexpr,
) -> None:
    """Store O in bf16, 16 bytes a lane: the four lanes of a row exchange words until each has 8
    dims.

    Args:
        results: (S, H, d_v) bf16. out: the consumer's half of the dims.
    """
    tile = ctx.plan.tile
    quad = ctx.thread % 4
    odd, upper = quad % 2 == 1, quad // 2 == 1
    row = (item.first + item.row) * tile.d_v + consumer * tile.half_dims
    at = results.iterator + (row + quad * 8)
    for block in cutlass.range_constexpr(tile.half_dims // BLOCK_DIMS):
        for h in cutlass.range_constexpr(THREAD_ROWS):
            first = BLOCK_DIMS // 2 * block + 2 * h
            words = [pack(out[first + 4 * i], out[first + 4 * i + 1]) for i in range(4)]
            words = transpose_quad(words, odd, upper)
            if item.row + 8 * h < item.count:
                cute.arch.inline_ptx(
                    "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[at + (h * 8 * tile.d_v + block * BLOCK_DIMS), *words],
                )
