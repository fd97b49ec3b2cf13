"""The end of a work item: both consumers' sums merged, O and lse to device memory."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.kernels.attention.sm90.core.products import OF_OUT
from flashdsa.kernels.attention.sm90.core.softmax import (
    THREAD_ROWS,
    Rows,
    Scale,
    exp2,
    multiply_rows,
    pack,
    quad_reduce,
    row_of_thread,
)
from flashdsa.kernels.attention.sm90.fwd.context import Context
from flashdsa.kernels.attention.sm90.fwd.plan import D_V, HALF_DIMS, ROWS

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
SUMS = ("left_sums", "right_sums")
"""The barriers of the sides' sums."""
BLOCK_DIMS = 32
"""Dims that four lanes exchange and store at once, 8 each."""


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
def merge_sums(
    ctx: Context, rows: Rows, scale: Scale, items: Int32, side: cutlass.Constexpr
) -> list[Float32]:
    """The rows' sums over both consumers' tiles, against O's maxima."""
    own_sums, other_sums = SUMS[side], SUMS[1 - side]
    shared = ctx.arena.array("row_sum", Float32, 2 * 2 * ROWS)
    row = row_of_thread(ctx.thread)
    own = [quad_reduce(rows.row_sum[h], lambda a, b: a + b) for h in range(THREAD_ROWS)]
    # The other consumer read the previous item's sums before its P of this item, and this one has
    # waited for that P.
    if ctx.thread % 4 == 0:
        for h in cutlass.range_constexpr(THREAD_ROWS):
            shared[(side * 2) * ROWS + row + 8 * h] = own[h]
            shared[(side * 2 + 1) * ROWS + row + 8 * h] = rows.row_max[h]
            if cutlass.const_expr(side == 1 and rows.largest is not None):
                ctx.arena.array("largest", Float32, ROWS)[row + 8 * h] = rows.largest[h]
    ctx.barriers(own_sums).arrive()
    ctx.barriers(other_sums).wait_for(items)
    sums = []
    for h in cutlass.range_constexpr(THREAD_ROWS):
        others = shared[(1 - side) * 2 * ROWS + row + 8 * h]
        others_max = shared[((1 - side) * 2 + 1) * ROWS + row + 8 * h]
        sums.append(
            own[h] * exp2((rows.row_max[h] - rows.out_max[h]) * scale.factor)
            + others * exp2((others_max - rows.out_max[h]) * scale.factor)
        )
    return sums


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


@cute.jit
def transpose_quad(words: list[Any], odd: Any, upper: Any) -> list[Any]:
    """Word i of lane j of four becomes word j of lane i."""
    a, b, ctx, d = words
    x = cute.arch.shuffle_sync_bfly(a if odd else b, 1)
    y = cute.arch.shuffle_sync_bfly(ctx if odd else d, 1)
    a, b = (x if odd else a), (b if odd else x)
    ctx, d = (y if odd else ctx), (d if odd else y)
    x = cute.arch.shuffle_sync_bfly(a if upper else ctx, 2)
    y = cute.arch.shuffle_sync_bfly(b if upper else d, 2)
    a, b = (x if upper else a), (y if upper else b)
    ctx, d = (ctx if upper else x), (d if upper else y)
    return [a, b, ctx, d]
