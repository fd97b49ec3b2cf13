"""The end of an item: the CTAs of its cluster exchange their O, each adds up a share of the dims.

A CTA's O is divided by its own sums. Behind a barrier of the cluster, when nobody reads keys any
more, each CTA sends every other one the dims that are that one's, into the place of its keys, and
its maxima and sums. Then each weighs and adds, in the order of the CTAs. One CTA alone writes what
it has.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.dsl.cluster import peer_address, store_async
from flashdsa.dsl.smem import load_words
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.sparse_mla.sm90.decode.context import SUMMED, Context
from flashdsa.kernels.sparse_mla.sm90.decode.plan import DIM_GROUPS, GROUP_DIMS, STATISTICS
from flashdsa.kernels.sparse_mla.sm90.fwd.epilogue import (
    BLOCK_DIMS,
    LN_2,
    LOG2_E,
    Place,
    clear_rows,
    merge_sums,
    store_rows,
    transpose_quad,
)
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import D_V, FP32, HALF_DIMS, ROWS
from flashdsa.kernels.sparse_mla.sm90.fwd.products import OF_OUT
from flashdsa.kernels.sparse_mla.sm90.fwd.softmax import (
    LEAST,
    THREAD_ROWS,
    Rows,
    Scale,
    exp2,
    multiply_rows,
    pack,
    row_of_thread,
)

GROUP_BYTES = GROUP_DIMS * FP32
STATISTICS_BYTES = STATISTICS * FP32
THREADS = 2 * WARPGROUP_SIZE
LANE_DIMS = 4
"""Dims that a thread adds up at once: 16 bytes."""


class Output(NamedTuple):
    """Where results go."""

    ctx: Context
    out: cute.Tensor  # (S, H, 512) bf16
    lse: cute.Tensor  # (S, H) fp32
    attn_sink: cute.Tensor  # (H,) fp32, or (0,): none
    scale: Scale


class Share(NamedTuple):
    """The groups of dims that are one CTA's."""

    first: Int32
    count: Int32


def rows_of_item(w: Output) -> Any:
    """Heads of the item that there are, of 64."""
    return cutlass.min(Int32(w.lse.shape[1]) - w.ctx.head, Int32(ROWS))


def first_row(w: Output) -> Any:
    """Number of the item's first row over queries and heads."""
    return Int64(w.ctx.query) * Int32(w.lse.shape[1]) + w.ctx.head


@cute.jit
def share_of(ctx: Context, rank: Int32) -> Share:
    """A CTA's share."""
    first = rank * DIM_GROUPS // ctx.num_ctas
    return Share(first, (rank + 1) * DIM_GROUPS // ctx.num_ctas - first)


@cute.jit
def factor_and_lse(w: Output, top: Float32, total: Float32, head: Int32) -> tuple[Any, Any]:
    """What a row's O is to be multiplied by, and its lse.

    Args:
        top: the maximum that the sum is against, log2. head: that there is.
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


@cute.jit
def write_share(w: Output, out: cute.Tensor, rows: Rows, side: cutlass.Constexpr) -> None:
    """A consumer's half of O, against `rows`, to the results."""
    ctx = w.ctx
    sums = merge_sums(ctx, rows, w.scale, side)
    if ctx.num_ctas == 1:
        write_alone(w, out, rows, sums, side)
    else:
        normalise(out, sums)
        if cutlass.const_expr(side == 0):
            if ctx.thread == 0:
                share = share_of(ctx, ctx.rank)
                row_bytes = share.count * GROUP_BYTES + STATISTICS_BYTES
                expected = ctx.num_ctas * rows_of_item(w) * row_bytes
                ctx.barriers("o_full").arrive_and_expect_tx(expected)
        # All CTAs have their O: no key and no P is read any more.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        send_statistics(w, rows, sums, side)
        send_dims(w, out, side)
        # o_full: all CTAs' dims and statistics have come.
        ctx.barriers("o_full").wait(0)
        weigh_rows(w, side)
        # SUMMED: every row's weights are there.
        cute.arch.barrier(barrier_id=SUMMED, number_of_threads=THREADS)
        add_up(w, side)


@cute.jit
def write_alone(
    w: Output, out: cute.Tensor, rows: Rows, sums: list[Float32], side: cutlass.Constexpr
) -> None:
    """The only CTA's half of O."""
    ctx = w.ctx
    row, count = row_of_thread(ctx.thread), rows_of_item(w)
    factors = []
    for h in cutlass.range_constexpr(THREAD_ROWS):
        factor = Float32(0.0)
        if row + 8 * h < count:
            factor, lse = factor_and_lse(
                w, rows.out_max[h] * w.scale.factor, sums[h], ctx.head + row + 8 * h
            )
            if cutlass.const_expr(side == 0):
                if ctx.thread % 4 == 0:
                    (w.lse.iterator + (first_row(w) + row + 8 * h)).store(lse)
        factors.append(factor)
    multiply_rows(out, factors)
    if cute.arch.vote_any_sync((factors[0] == 0.0) | (factors[1] == 0.0)):
        clear_rows(out, factors)
    store_rows(w, out, Place(first_row(w), count, ctx.head + row, row), side)


@cute.jit
def normalise(out: cute.Tensor, sums: list[Float32]) -> None:
    """O divided by the CTA's own sums; 0 of a row without a key."""
    factors = []
    for h in cutlass.range_constexpr(THREAD_ROWS):
        factors.append(cute.arch.rcp_approx(sums[h]) if sums[h] != 0.0 else Float32(0.0))
    multiply_rows(out, factors)


@cute.jit
def send_statistics(w: Output, rows: Rows, sums: list[Float32], side: cutlass.Constexpr) -> None:
    """This CTA's maxima and sums to all; the four lanes of a row take peers in turn."""
    ctx = w.ctx
    if cutlass.const_expr(side == 0):
        row, count = row_of_thread(ctx.thread), rows_of_item(w)
        barrier = Int32(ctx.barriers("o_full").at().toint())
        for h in cutlass.range_constexpr(THREAD_ROWS):
            if row + 8 * h < count:
                to = ctx.arena.address("p") + (ctx.rank * ROWS + row + 8 * h) * STATISTICS_BYTES
                words = [bits_of(rows.out_max[h]), bits_of(sums[h])]
                for peer in cutlass.range(ctx.thread % 4, ctx.num_ctas, 4, unroll=1):
                    store_async(peer_address(to, peer), words, peer_address(barrier, peer))


def bits_of(value: Any) -> Any:
    """fp32 as a word."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


@cute.jit
def send_dims(w: Output, out: cute.Tensor, side: cutlass.Constexpr) -> None:
    """This consumer's dims to the CTAs whose they are: the four lanes of a row exchange numbers
    until each has 8 neighbouring dims."""
    ctx = w.ctx
    quad = ctx.thread % 4
    odd, upper = quad % 2 == 1, quad // 2 == 1
    row, count = row_of_thread(ctx.thread), rows_of_item(w)
    base = ctx.arena.address("k")
    barrier = Int32(ctx.barriers("o_full").at().toint())
    for block in cutlass.range_constexpr(HALF_DIMS // BLOCK_DIMS):
        group = (side * HALF_DIMS + block * BLOCK_DIMS) // GROUP_DIMS + quad
        owner = ((group + 1) * ctx.num_ctas - 1) // DIM_GROUPS
        share = share_of(ctx, owner)
        arrived = peer_address(barrier, owner)
        for h in cutlass.range_constexpr(THREAD_ROWS):
            first = OF_OUT * BLOCK_DIMS // HALF_DIMS * block + 2 * h
            even_dims = transpose_quad([bits_of(out[first + 4 * i]) for i in range(4)], odd, upper)
            odd_dims = transpose_quad(
                [bits_of(out[first + 4 * i + 1]) for i in range(4)], odd, upper
            )
            if row + 8 * h < count:
                place = (ctx.rank * count + row + 8 * h) * share.count + group - share.first
                to = peer_address(base + place * GROUP_BYTES, owner)
                for part in cutlass.range_constexpr(2):
                    i = 2 * part
                    store_async(
                        to + part * (GROUP_BYTES // 2),
                        [even_dims[i], odd_dims[i], even_dims[i + 1], odd_dims[i + 1]],
                        arrived,
                    )


@cute.jit
def weigh_rows(w: Output, side: cutlass.Constexpr) -> None:
    """The weight of each CTA's row of O, one thread a row; the first CTA writes lse."""
    ctx = w.ctx
    if cutlass.const_expr(side == 0):
        row, count = ctx.thread, rows_of_item(w)
        if row < count:
            statistics = ctx.arena.address("p") + row * STATISTICS_BYTES
            weights = ctx.arena.address("q") + row * FP32
            top = Float32(LEAST)
            for rank in cutlass.range(ctx.num_ctas, unroll=1):
                top = cute.arch.fmax(
                    top, load_pair(statistics + rank * (ROWS * STATISTICS_BYTES))[0]
                )
            total = Float32(0.0)
            for rank in cutlass.range(ctx.num_ctas, unroll=1):
                row_max, row_sum = load_pair(statistics + rank * (ROWS * STATISTICS_BYTES))
                weight = row_sum * exp2((row_max - top) * w.scale.factor)
                total += weight
                store_word(weights + rank * (ROWS * FP32), weight)
            factor, lse = factor_and_lse(w, top * w.scale.factor, total, ctx.head + row)
            store_word(weights + ctx.num_ctas * (ROWS * FP32), factor)
            if ctx.rank == 0:
                (w.lse.iterator + (first_row(w) + row)).store(lse)


def load_pair(address: Any) -> Any:
    """Two neighbouring fp32 of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32, Float32],
        read_only_args=[address],
    )


def load_word(address: Any) -> Any:
    """One fp32 of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


def store_word(address: Any, value: Any) -> None:
    """One fp32 to shared memory."""
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def add_up(w: Output, side: cutlass.Constexpr) -> None:
    """Every row of this CTA's dims: the CTAs' O times their weights, in their order."""
    ctx = w.ctx
    count = rows_of_item(w)
    share = share_of(ctx, ctx.rank)
    lanes = share.count * (GROUP_DIMS // LANE_DIMS)  # of a row
    bytes_of_cta = count * share.count * GROUP_BYTES
    thread = ctx.thread + side * WARPGROUP_SIZE
    to = w.out.iterator + (first_row(w) * D_V + share.first * GROUP_DIMS)
    for i in cutlass.range(thread, count * lanes, THREADS, unroll=1):
        row = i // lanes
        weights = ctx.arena.address("q") + row * FP32
        place = ctx.arena.address("k") + i * (LANE_DIMS * FP32)
        sums = [Float32(0.0) for _ in range(LANE_DIMS)]
        for rank in cutlass.range(ctx.num_ctas, unroll=1):
            weight = load_word(weights + rank * (ROWS * FP32))
            values = load_words(place + rank * bytes_of_cta, Float32)
            if weight != 0.0:  # whatever the O of a part without a key is
                for d in cutlass.range_constexpr(LANE_DIMS):
                    sums[d] = sums[d] + weight * values[d]
        factor = load_word(weights + ctx.num_ctas * (ROWS * FP32))
        words = [Int32(0), Int32(0)]
        if factor != 0.0:
            words = [
                pack(sums[2 * j] * factor, sums[2 * j + 1] * factor) for j in range(LANE_DIMS // 2)
            ]
        cute.arch.inline_ptx(
            "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
            read_only_args=[
                to + (Int64(row) * D_V + (i - row * lanes) * LANE_DIMS),
                *words,
            ],
        )
