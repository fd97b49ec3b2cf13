"""The end of a work item: both consumers' sums merged, O and lse to device memory."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.dsl.fragments import (
    BLOCK_DIMS,
    THREAD_ROWS,
    exp2,
    pack,
    row_of_thread,
    transpose_quad,
)
from flashdsa.kernels.attention.sm90.core.consumers import merge_sums
from flashdsa.kernels.attention.sm90.core.products import OF_OUT
from flashdsa.kernels.attention.sm90.core.softmax import LN_2, LOG2_E, Rows, Scale, multiply_rows
from flashdsa.kernels.attention.sm90.core.tile import D_V, HALF_DIMS, ROWS
from flashdsa.kernels.attention.sm90.fwd.context import Context


class Output(NamedTuple):
    """Destination of the results."""

    ctx: Context
    out: cute.Tensor  # (S, H, 512) bf16
    lse: cute.Tensor  # (S, H) fp32
    max_logits: cute.Tensor  # (S * H,) fp32; of a plan without them (0,)
    attn_sink: cute.Tensor  # (H,) fp32, or (0,): none
    scale: Scale


class Place(NamedTuple):
    """Position of an item's rows in the results, which are numbered over queries and heads."""

    first: Int64  # number of the item's first row
    count: Int32  # existing rows, of 64
    head: Int32  # of this thread's first row
    row: Int32  # this thread's first row in the item


@cute.jit
def place_of(w: Output, item: Int32) -> Place:
    """The item's rows."""
    ctx = w.ctx
    row = row_of_thread(ctx.thread)
    if cutlass.const_expr(ctx.plan.group > 1):
        first = item * ROWS
        count = Int32(w.lse.shape[0]) * ctx.plan.group_heads - first
        return Place(Int64(first), count, row % ctx.plan.group_heads, row)
    num_heads = Int32(w.lse.shape[1])
    query = item // ctx.blocks
    head = (item - query * ctx.blocks) * ROWS
    return Place(Int64(query) * num_heads + head, num_heads - head, head + row, row)


@cute.jit
def write_item(
    w: Output, out: cute.Tensor, rows: Rows, items: Int32, side: cutlass.Constexpr
) -> None:
    """Write a consumer's half of O, divided by the rows' sums; side 0 writes lse and maxima, too.

    Args:
        items: number that the CTA has ended before.
    """
    ctx = w.ctx
    sums = merge_sums(ctx, rows, w.scale, items, side)
    place = place_of(w, ctx.first_item + items * ctx.num_ctas)
    factors = []
    for h in cutlass.range_constexpr(THREAD_ROWS):
        total, head = sums[h], place.head
        if cutlass.const_expr(ctx.plan.group_heads > 8):
            head += 8 * h
        present = place.row + 8 * h < place.count
        factor, lse = Float32(0.0), Float32(float("inf"))
        if total != 0.0:
            top = rows.out_max[h] * w.scale.factor
            lse = (top + cute.math.log2(total, fastmath=True)) * LN_2
            factor = cute.arch.rcp_approx(total)
            if w.attn_sink.shape[0] > 0 and present:
                sink = (w.attn_sink.iterator + head).load()
                factor = cute.arch.rcp_approx(total + exp2(sink * LOG2_E - top))
                if sink == float("inf"):
                    factor = Float32(0.0)  # of a sum that is NaN too
        if cutlass.const_expr(side == 0):
            if present and ctx.thread % 4 == 0:
                number = place.first + place.row + 8 * h
                (w.lse.iterator + number).store(lse)
                if cutlass.const_expr(ctx.plan.max_logits):
                    others = ctx.arena.array("largest", Float32, ROWS)[place.row + 8 * h]
                    largest = cute.arch.fmax(rows.largest[h], others) * w.scale.factor
                    (w.max_logits.iterator + number).store(largest * LN_2)
        factors.append(factor)
    multiply_rows(out, factors)
    if cute.arch.vote_any_sync((factors[0] == 0.0) | (factors[1] == 0.0)):
        clear_rows(out, factors)
    store_rows(w, out, place, side)


def clear_rows(out: Any, factors: Any) -> None:
    """Write 0 where the factor is 0: O may be NaN in these rows."""
    for i in range(OF_OUT):
        out[i] = select(factors[i // 2 % THREAD_ROWS] == 0.0, Float32(0.0), out[i])


@cute.jit
def select(condition: Any, yes: Any, no: Any) -> Any:
    """One of two values."""
    return yes if condition else no


@cute.jit
def store_rows(w: Output, out: cute.Tensor, place: Place, side: cutlass.Constexpr) -> None:
    """Store O in bf16, 16 bytes a lane: the four lanes of a row exchange words until each has 8
    dims."""
    quad = w.ctx.thread % 4
    odd, upper = quad % 2 == 1, quad // 2 == 1
    row = (place.first + place.row) * D_V + side * HALF_DIMS
    at = w.out.iterator + (row + quad * 8)
    for block in cutlass.range_constexpr(HALF_DIMS // BLOCK_DIMS):
        for h in cutlass.range_constexpr(THREAD_ROWS):
            first = OF_OUT * BLOCK_DIMS // HALF_DIMS * block + 2 * h
            words = [pack(out[first + 4 * i], out[first + 4 * i + 1]) for i in range(4)]
            words = transpose_quad(words, odd, upper)
            if place.row + 8 * h < place.count:
                cute.arch.inline_ptx(
                    "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[at + (h * 8 * D_V + block * BLOCK_DIMS), *words],
                )
