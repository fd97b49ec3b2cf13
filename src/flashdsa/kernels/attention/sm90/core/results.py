"""Rows of O in registers, and where they go in the results."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from flashdsa.dsl import smem, swizzle, warp_matrix
from flashdsa.dsl.fragments import BLOCK_DIMS, MMA_ROWS, THREAD_ROWS, exp2, pack
from flashdsa.dsl.gmem import load_if, store4
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core import consumers, context, softmax
from flashdsa.kernels.attention.sm90.core.tile import BF16, ROWS

BLOCK_BYTES = BLOCK_DIMS * BF16
STAGED_BYTES = MMA_ROWS * BLOCK_BYTES
"""Bytes of a block of a warp's rows."""
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


def ask_sink(attn_sink: cute.Tensor, head: Any, exists: Any) -> Int32:
    """Load a head's sink, if there is one; nobody waits for it before `factor_and_lse`."""
    asked = (attn_sink.shape[0] > 0) & exists
    return load_if(Int32(asked), attn_sink.iterator + head)


@cute.jit
def factor_and_lse(
    attn_sink: cute.Tensor, asked: Int32, top: Float32, total: Float32
) -> tuple[Float32, Float32]:
    """(factor of a row's O, its lse). `asked`: by `ask_sink`. `top`: log2 maximum of the sum."""
    has_sink = attn_sink.shape[0] > 0
    sink = select(has_sink, asked.bitcast(Float32), -Float32(float("inf")))
    factor, lse = Float32(0.0), Float32(float("inf"))
    if total != 0.0:
        lse = (top + cute.math.log2(total, fastmath=True)) * softmax.LN_2
        factor = cute.arch.rcp_approx(total + exp2(sink * softmax.LOG2_E - top))
        if sink == float("inf"):
            factor = Float32(0.0)  # of a sum that is NaN too
    return factor, lse


def ask_sinks(w: Any, item: ItemRows) -> list[Int32]:
    """Load the sinks of the thread's rows, for `factors_of_rows`, which takes the same `w`."""
    # Groups of eight queries have heads of another one eight rows on.
    apart = 8 if w.ctx.plan.group_heads > 8 else 0
    return [
        ask_sink(w.attn_sink, item.head + apart * h, item.row + 8 * h < item.count)
        for h in range(THREAD_ROWS)
    ]


@cute.jit
def factors_of_rows(
    w: Any,
    rows: softmax.Rows,
    sums: list[Float32],
    item: ItemRows,
    asked: list[Int32],
    consumer: cutlass.Constexpr,
) -> list[Float32]:
    """The factors of O of the thread's rows; consumer 0 writes lse, and the largest logits. `w`:
    ctx, lse, attn_sink, scale, and max_logits if the rows have the largest scores; the forward's
    `Consumer` or a decode's `Output`. `asked`: result of `ask_sinks`."""
    factors = []
    for h in cutlass.range_constexpr(THREAD_ROWS):
        top = rows.out_max[h] * w.scale.factor
        factor, lse = factor_and_lse(w.attn_sink, asked[h], top, sums[h])
        if cutlass.const_expr(consumer == 0):
            if item.row + 8 * h < item.count and w.ctx.thread % 4 == 0:
                write_statistics(w, rows, item, h, lse)
        factors.append(factor)
    return factors


@cute.jit
def write_statistics(
    w: Any, rows: softmax.Rows, item: ItemRows, h: cutlass.Constexpr, lse: Float32
) -> None:
    """Write a row's lse, and its largest logit if the kernel has them and the call wants them."""
    row = item.first + item.row + 8 * h
    (w.lse.iterator + row).store(lse)
    if cutlass.const_expr(rows.largest is not None):
        if w.max_logits.shape[0] > 0:
            others = w.ctx.memory.largest.array(Float32, ROWS)[item.row + 8 * h]
            largest = cute.arch.fmax(rows.largest[h], others) * w.scale.factor
            (w.max_logits.iterator + row).store(largest * softmax.LN_2)


@cute.jit
def store_rows(
    ctx: context.StepContext,
    results: cute.Tensor,
    out: cute.Tensor,
    factors: list[Float32],
    item: ItemRows,
    consumer: Any,
    staged: Any,
    pitch: cutlass.Constexpr,
) -> None:
    """Store O times its factors in bf16: a warp stages 32 dims of its rows, and each lane stores 16
    bytes. Bulk copies of rows take 1.6 times as long: 20 bytes a clock, stores 32.

    Args:
        results: (S, H, d_v) bf16. out: the consumer's half of the dims.
        factors: of the thread's rows; 0 of a row whose O is 0, whatever it says.
        consumer: whose half of the dims it is.
        staged: address of `STAGED_BYTES` in shared memory that this warp alone uses.
        pitch: bytes from one block of 32 dims to the next one; 0: all take one place by turns.
    """
    # The product comes last, or registers spill.
    if cute.arch.vote_any_sync((factors[0] == 0.0) | (factors[1] == 0.0)):
        clear_rows(out, factors)
    softmax.multiply_rows(out, factors)
    tile = ctx.plan.tile
    lane = ctx.thread % WARP_SIZE
    units = [2 * pair + lane // MMA_ROWS for pair in range(2)]
    to = [staged + swizzle.swizzled_64(lane % MMA_ROWS, unit) for unit in units]
    row, unit = lane // LANES_A_ROW, lane % LANES_A_ROW
    source = staged + swizzle.swizzled_64(row, unit)
    first = (item.first + item.row) * tile.d_v + consumer * tile.half_dims
    at = results.iterator + (first + unit * (BLOCK_DIMS // LANES_A_ROW))
    for block in cutlass.range_constexpr(tile.half_dims // BLOCK_DIMS):
        for pair in cutlass.range_constexpr(2):
            i = BLOCK_DIMS // 2 * block + 8 * pair
            warp_matrix.store_matrices(
                to[pair] + block * pitch,
                [pack(out[i + 2 * j], out[i + 2 * j + 1]) for j in range(4)],
            )
        cute.arch.sync_warp()
        for h in cutlass.range_constexpr(THREAD_ROWS):
            # Rows 8 apart have their pieces in the same order.
            words = smem.load_words(source + (block * pitch + h * (8 * BLOCK_BYTES)), Int32)
            if item.row + 8 * h < item.count:
                store4(at + (h * 8 * tile.d_v + block * BLOCK_DIMS), [words[j] for j in range(4)])
        if cutlass.const_expr(pitch == 0):
            cute.arch.sync_warp()


def staged_after_p(ctx: context.StepContext, items: Int32, consumer: int) -> Any:
    """Address for `store_rows` where P of tile 1 was, after `merge_sums`. Consumer 1 stores its
    next P after consumer 0's next one, so that what is staged here is read. `items`: number that
    the CTA has ended before."""
    if consumer == 0:
        # sums0_full: no warp of this consumer, the only reader of that P, reads it any more.
        ctx.memory.sums0_full.wait_for(items)
    return consumers.p_address(ctx, 1) + (consumer * WARPS + ctx.thread // WARP_SIZE) * STAGED_BYTES
