"""Rows of O in registers, and where they go in the results."""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from flashdsa.dsl.fragments import BLOCK_DIMS, MMA_ROWS, THREAD_ROWS, pack
from flashdsa.dsl.gmem import store4
from flashdsa.dsl.smem import load_words
from flashdsa.dsl.swizzle import swizzled_64
from flashdsa.dsl.warp_matrix import store_matrices
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.consumers import p_address
from flashdsa.kernels.attention.sm90.core.context import StepContext
from flashdsa.kernels.attention.sm90.core.softmax import multiply_rows
from flashdsa.kernels.attention.sm90.core.tile import BF16

BLOCK_BYTES = BLOCK_DIMS * BF16
LANES_A_ROW = 4
WARPS = WARPGROUP_SIZE // WARP_SIZE


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
    factors: list[Float32],
    item: ItemRows,
    items: Int32,
    consumer: cutlass.Constexpr,
) -> None:
    """Store O times its factors in bf16, after `merge_sums`: a warp stages 32 dims of its rows
    where P of tile 1 was, and each lane stores 16 bytes. The code is short, as code that runs once
    costs most: it is fetched.

    Consumer 1 stores its next P after consumer 0's next one, so that what is staged here is read.

    Args:
        results: (S, H, d_v) bf16. out: the consumer's half of the dims.
        factors: of the thread's rows; 0 of a row whose O is 0, whatever it says.
        items: number that the CTA has ended before.
    """
    # The product comes last, or registers spill.
    if cute.arch.vote_any_sync((factors[0] == 0.0) | (factors[1] == 0.0)):
        clear_rows(out, factors)
    multiply_rows(out, factors)
    tile = ctx.plan.tile
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    if cutlass.const_expr(consumer == 0):
        # sums0_full: no warp of this consumer, the only reader of that P, reads it any more.
        ctx.memory.sums0_full.wait_for(items)
    staged = p_address(ctx, 1) + (consumer * WARPS + warp) * (MMA_ROWS * BLOCK_BYTES)
    units = [2 * pair + lane // MMA_ROWS for pair in range(2)]
    to = [staged + swizzled_64(lane % MMA_ROWS, unit) for unit in units]
    row, unit = lane // LANES_A_ROW, lane % LANES_A_ROW
    source = staged + swizzled_64(row, unit)
    first = (item.first + item.row) * tile.d_v + consumer * tile.half_dims
    at = results.iterator + (first + unit * (BLOCK_DIMS // LANES_A_ROW))
    for block in cutlass.range_constexpr(tile.half_dims // BLOCK_DIMS):
        for pair in cutlass.range_constexpr(2):
            i = BLOCK_DIMS // 2 * block + 8 * pair
            store_matrices(to[pair], [pack(out[i + 2 * j], out[i + 2 * j + 1]) for j in range(4)])
        cute.arch.sync_warp()
        for h in cutlass.range_constexpr(THREAD_ROWS):
            # Rows 8 apart have their pieces in the same order.
            words = load_words(source + h * (8 * BLOCK_BYTES), Int32)
            if item.row + 8 * h < item.count:
                store4(at + (h * 8 * tile.d_v + block * BLOCK_DIMS), [words[j] for j in range(4)])
        cute.arch.sync_warp()
