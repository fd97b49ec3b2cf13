"""The end of an item: each CTA of its cluster adds up a share of the dims of all their O.

`exchange.py` documents the layout of O and its transfer. A warp has eight rows: it finds
the weight of each CTA's part of them, adds the parts in the CTAs' order, and writes its share of
the results.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.dsl.fragments import THREAD_ROWS, exp2, pack, row_of_thread
from flashdsa.dsl.smem import load_words
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.results import ItemRows
from flashdsa.kernels.attention.sm90.core.softmax import LEAST, LN_2, LOG2_E, Rows
from flashdsa.kernels.attention.sm90.core.tile import FP32, ROWS
from flashdsa.kernels.attention.sm90.decode.shared.context import Output, meet_consumers
from flashdsa.kernels.attention.sm90.decode.shared.exchange import (
    address_of_dims,
    exchange,
    leave,
    rows_of_item,
    share_of,
    staged_rows,
)
from flashdsa.kernels.attention.sm90.decode.shared.plan import (
    CTA_STATISTICS_BYTES,
    GROUP_BYTES,
    GROUP_DIMS,
    MOST_CTAS,
    STATISTICS_BYTES,
)
from flashdsa.kernels.attention.sm90.decode.shared.words import from_f16, load_float, store_pair

WEIGHTS_AT = MOST_CTAS * CTA_STATISTICS_BYTES
"""Offset in region q of the weights of each half of each CTA's rows, after the statistics."""
WEIGHTS_BYTES = 2 * FP32
WARP_ROWS = 8
LANES_A_ROW = WARP_SIZE // WARP_ROWS
AT_ONCE = 4
"""Groups that a lane adds up together."""


@cute.jit
def write_share(w: Output, consumer: Int32) -> None:
    """Both consumers, one code: write their part of the CTA's share of the results."""
    ctx = w.ctx
    # staged: both halves of this CTA's O are staged.
    meet_consumers(ctx.memory.staged)
    if ctx.num_ctas > 1:
        exchange(w, consumer)
    lane = ctx.thread % WARP_SIZE
    row = (ctx.thread + consumer * WARPGROUP_SIZE) // WARP_SIZE * WARP_ROWS + lane % WARP_ROWS
    factor = weigh_row(w, row, lane // WARP_ROWS)
    cute.arch.sync_warp()
    if row < rows_of_item(w):
        add_up(w, row, lane // WARP_ROWS, factor)
    if ctx.num_ctas > 1:
        leave(ctx, consumer)


@cute.jit
def weigh_row(w: Output, row: Int32, number: Int32) -> Float32:
    """Return the factor of the sum of a row's weighted O; the first CTA writes the row's lse.

    Args:
        number: of the lane among the four that share the row; each weighs every fourth CTA.
    """
    ctx = w.ctx
    base = ctx.memory.q.address() + row * STATISTICS_BYTES
    weights = ctx.memory.q.address() + (WEIGHTS_AT + row * WEIGHTS_BYTES)
    top, total, factor = Float32(LEAST), Float32(0.0), Float32(0.0)
    is_present = row < rows_of_item(w)
    if is_present:
        for rank in cutlass.range(number, ctx.num_ctas, LANES_A_ROW, unroll=1):
            top = cute.arch.fmax(top, load_words(base + rank * CTA_STATISTICS_BYTES, Float32)[0])
    top = row_reduce(top, cute.arch.fmax)
    if is_present:
        for rank in cutlass.range(number, ctx.num_ctas, LANES_A_ROW, unroll=1):
            words = load_words(base + rank * CTA_STATISTICS_BYTES, Float32)
            weight = words[1] * exp2((words[0] - top) * w.scale.factor)
            total += weight
            to = weights + rank * (ROWS * WEIGHTS_BYTES)
            store_pair(to, weight * words[2], weight * words[3])
    total = row_reduce(total, lambda a, b: a + b)
    if is_present:
        factor, lse = factor_and_lse(w, top * w.scale.factor, total, ctx.head + row)
        if ctx.rank == 0 and number == 0:
            (w.lse.iterator + (first_row(w) + row)).store(lse)
    return factor


def row_reduce(value: Any, combine: Any) -> Any:
    """Reduce over the four lanes that share a row; all four get the result."""
    for offset in (WARP_ROWS, 2 * WARP_ROWS):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset))
    return value


@cute.jit
def factor_and_lse(w: Output, top: Float32, total: Float32, head: Int32) -> tuple[Any, Any]:
    """(the factor of a row's O, the row's lse).

    Args:
        top: the maximum that the sum is against, log2. head: an existing one.
    """
    factor, lse = Float32(0.0), Float32(float("inf"))
    if total != 0.0:
        lse = (top + cute.math.log2(total, fastmath=True)) * LN_2
        factor = cute.arch.rcp_approx(total)
        if w.attn_sink.shape[0] > 0:
            sink = (w.attn_sink.iterator + head).load()
            factor = cute.arch.rcp_approx(total + exp2(sink * LOG2_E - top))
            if sink == float("inf"):
                factor = Float32(0.0)  # of a sum that is NaN too
    return factor, lse


def rows_of_thread(w: Output) -> ItemRows:
    """The thread's rows of an item that no other CTA shares."""
    row = row_of_thread(w.ctx.thread)
    return ItemRows(first_row(w), rows_of_item(w), w.ctx.head + row, row)


@cute.jit
def factors_of_rows(
    w: Output, rows: Rows, sums: list[Float32], item: ItemRows, consumer: cutlass.Constexpr
) -> list[Float32]:
    """The factors of O of `rows_of_thread`; consumer 0 writes lse."""
    factors = []
    for h in cutlass.range_constexpr(THREAD_ROWS):
        factor, lse = Float32(0.0), Float32(0.0)
        if item.row + 8 * h < item.count:
            top = rows.out_max[h] * w.scale.factor
            factor, lse = factor_and_lse(w, top, sums[h], item.head + 8 * h)
            if cutlass.const_expr(consumer == 0):
                if w.ctx.thread % 4 == 0:
                    (w.lse.iterator + (item.first + item.row + 8 * h)).store(lse)
        factors.append(factor)
    return factors


@cute.jit
def add_up(w: Output, row: Int32, number: Int32, factor: Float32) -> None:
    """Add up every fourth group of this CTA's dims of a row: the CTAs' O times their weights.

    Several groups are added at a time while that many are left: each alone waits for shared memory.
    """
    i, count = number, share_of(w.ctx, w.ctx.rank).count
    while i + (AT_ONCE - 1) * LANES_A_ROW < count:
        add_groups(w, row, i, factor, AT_ONCE)
        i += AT_ONCE * LANES_A_ROW
    while i < count:
        add_groups(w, row, i, factor, 1)
        i += LANES_A_ROW


@cute.jit
def add_groups(
    w: Output, row: Int32, first: Int32, factor: Float32, num_groups: cutlass.Constexpr
) -> None:
    """Add up groups `first`, `first` + 4, ... of this CTA's dims of a row."""
    ctx = w.ctx
    share, rows = share_of(ctx, ctx.rank), staged_rows(w)
    weights = ctx.memory.q.address() + (WEIGHTS_AT + row * WEIGHTS_BYTES)
    half_groups = ctx.plan.dim_groups // 2
    numbers = [first + n * LANES_A_ROW for n in range(num_groups)]
    halves = [(share.first + i) // half_groups * FP32 for i in numbers]
    sums = [Float32(0.0) for _ in range(num_groups * GROUP_DIMS)]
    for rank in cutlass.range(ctx.num_ctas, unroll=1):
        base = address_of_dims(w, rank) + row * GROUP_BYTES
        units = [load_words(base + i * (rows * GROUP_BYTES), Int32) for i in numbers]
        for n in cutlass.range_constexpr(num_groups):
            weight = load_float(weights + rank * (ROWS * WEIGHTS_BYTES) + halves[n])
            values = [value for word in range(4) for value in from_f16(units[n][word])]
            for d in cutlass.range_constexpr(GROUP_DIMS):
                # 0 times what a part without a key sends may be NaN.
                value = values[d] if weight != 0.0 else Float32(0.0)
                sums[n * GROUP_DIMS + d] = sums[n * GROUP_DIMS + d] + weight * value
    for n in cutlass.range_constexpr(num_groups):
        of_group = [value * factor for value in sums[n * GROUP_DIMS : (n + 1) * GROUP_DIMS]]
        words = [pack(of_group[2 * j], of_group[2 * j + 1]) for j in range(GROUP_DIMS // 2)]
        if factor == 0.0:
            words = [Int32(0) for _ in range(GROUP_DIMS // 2)]
        group = share.first + numbers[n]
        to = w.out.iterator + ((first_row(w) + row) * ctx.plan.tile.d_v + group * GROUP_DIMS)
        cute.arch.inline_ptx(
            "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[to, *words],
        )


def first_row(w: Output) -> Any:
    """Number of the item's first row over queries and heads."""
    return Int64(w.ctx.query) * Int32(w.lse.shape[1]) + w.ctx.head
