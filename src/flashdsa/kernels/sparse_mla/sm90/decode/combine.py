"""The end of an item: the CTAs of its cluster exchange their O, each adds up a share of the dims.

A CTA's O is divided by its own sums, and goes out in f16, each half of a row in units of a power of
two of its own, which makes its largest number one from 2^14 to 2^15. When all have told all that
they read no keys any more, each CTA sends every one the dims that are that one's, into the place of
its keys, and its maxima and sums: two bulk copies each. Then each weighs and adds, in the order of
the CTAs. One CTA alone writes what it has.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.dsl.cluster import copy_to_peer, peer_address, store_async
from flashdsa.dsl.smem import load_words, store_float, store_words
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.sparse_mla.sm90.decode.context import SUMMED, Context
from flashdsa.kernels.sparse_mla.sm90.decode.plan import (
    DIM_GROUPS,
    GROUP_BYTES,
    GROUP_DIMS,
    MOST_CTAS,
    STATISTICS,
)
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
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import D_V, FP32, HALF_DIMS, ROWS, TILE_BYTES
from flashdsa.kernels.sparse_mla.sm90.fwd.products import F16_KIND, OF_OUT
from flashdsa.kernels.sparse_mla.sm90.fwd.softmax import (
    LEAST,
    THREAD_ROWS,
    Rows,
    Scale,
    exp2,
    multiply_rows,
    pack,
    quad_reduce,
    row_of_thread,
)

STATISTICS_BYTES = STATISTICS * FP32
OF_CTA = ROWS * STATISTICS_BYTES
"""Bytes of a CTA's statistics."""
STAGED_AT = TILE_BYTES
"""Of the region k: O that is to be sent, behind what comes."""
STATISTICS_AT = STAGED_AT + DIM_GROUPS * ROWS * GROUP_BYTES
WEIGHTS_AT = MOST_CTAS * OF_CTA
"""Of the region q: the weights of each half of each CTA's rows, behind the statistics."""
WEIGHTS_BYTES = 2 * FP32
FACTORS_AT = WEIGHTS_AT + MOST_CTAS * ROWS * WEIGHTS_BYTES
THREADS = 2 * WARPGROUP_SIZE
TOKENS = ("ready", "done")
TOKEN_BYTES = 4
TOP_EXPONENT = 14
BIAS = 127
MOST_POWER = 100


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
    sums = merge_sums(ctx, rows, w.scale, Int32(0), side)
    if ctx.num_ctas == 1:
        write_alone(w, out, rows, sums, side)
    else:
        expect_messages(w, side)
        units = normalise(out, sums)
        stage_statistics(w, rows, sums, units, side)
        stage_dims(w, out, side)
        # The bulk copies read what threads have staged.
        cute.arch.fence_proxy("async.shared", space="cta")
        # SUMMED: this CTA's O is staged, and nobody of it reads keys or P any more.
        cute.arch.barrier(barrier_id=SUMMED, number_of_threads=THREADS)
        tell_all(ctx, "ready", side)
        send(w, side)
        # o_full: all CTAs' dims and statistics have come.
        ctx.barriers("o_full").wait(0)
        tell_all(ctx, "done", side)
        weigh_rows(w, side)
        # SUMMED: every row's weights are there.
        cute.arch.barrier(barrier_id=SUMMED, number_of_threads=THREADS)
        add_up(w, side)
        if cutlass.const_expr(side == 0):
            if ctx.thread < WARP_SIZE:
                # done: what this CTA sent has been read, and it may end.
                ctx.barriers("done").wait(0)


@cute.jit
def expect_messages(w: Output, side: cutlass.Constexpr) -> None:
    """One thread announces what the CTAs of the cluster will send."""
    ctx = w.ctx
    if cutlass.const_expr(side == 0):
        if ctx.thread == 0:
            share = share_of(ctx, ctx.rank)
            row_bytes = share.count * GROUP_BYTES + STATISTICS_BYTES
            expected = ctx.num_ctas * rows_of_item(w) * row_bytes
            ctx.barriers("o_full").arrive_and_expect_tx(expected)
            for name in TOKENS:
                ctx.barriers(name).arrive_and_expect_tx(ctx.num_ctas * TOKEN_BYTES)


@cute.jit
def tell_all(ctx: Context, name: cutlass.Constexpr, side: cutlass.Constexpr) -> None:
    """A word to every CTA of the cluster: what came before it has been done.

    A barrier of the cluster with release semantics would be a fence of the whole GPU besides.
    """
    if cutlass.const_expr(side == 0):
        if ctx.thread < ctx.num_ctas:
            place = TOKENS.index(name) * MOST_CTAS * TOKEN_BYTES
            token = ctx.arena.address("tokens") + (place + ctx.rank * TOKEN_BYTES)
            barrier = Int32(ctx.barriers(name).at().toint())
            store_async(
                peer_address(token, ctx.thread),
                [ctx.rank],
                peer_address(barrier, ctx.thread),
            )


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
def normalise(out: cute.Tensor, sums: list[Float32]) -> list[Float32]:
    """O divided by the CTA's own sums, 0 of a row without a key, in the units that are returned."""
    factors, units = [], []
    for h in cutlass.range_constexpr(THREAD_ROWS):
        inverse = cute.arch.rcp_approx(sums[h]) if sums[h] != 0.0 else Float32(0.0)
        top = Float32(0.0)
        for i in [i for i in range(OF_OUT) if i // 2 % THREAD_ROWS == h]:
            top = cute.arch.fmax(top, cute.arch.fmax(out[i], -out[i]))
        exponent = (bits_of(quad_reduce(top * inverse, cute.arch.fmax)) >> 23) - BIAS
        power = cutlass.min(TOP_EXPONENT - exponent, Int32(MOST_POWER))
        factors.append(inverse * power_of_two(power))
        units.append(power_of_two(-power))
    multiply_rows(out, factors)
    return units


@cute.jit
def stage_statistics(
    w: Output, rows: Rows, sums: list[Float32], units: list[Float32], side: cutlass.Constexpr
) -> None:
    """This CTA's maxima and sums, and this half's units, into its own shared memory."""
    ctx = w.ctx
    row = row_of_thread(ctx.thread)
    if ctx.thread % 4 == 0:
        for h in cutlass.range_constexpr(THREAD_ROWS):
            to = ctx.arena.address("k") + (STATISTICS_AT + (row + 8 * h) * STATISTICS_BYTES)
            if cutlass.const_expr(side == 0):
                store_pair(to, rows.out_max[h], sums[h])
            store_float(to + (2 + side) * FP32, units[h])


@cute.jit
def stage_dims(w: Output, out: cute.Tensor, side: cutlass.Constexpr) -> None:
    """This consumer's dims into its own shared memory, in a stretch for each CTA whose they are.

    The four lanes of a row exchange words until each has 8 neighbouring dims.
    """
    ctx = w.ctx
    quad = ctx.thread % 4
    odd, upper = quad % 2 == 1, quad // 2 == 1
    row, count = row_of_thread(ctx.thread), rows_of_item(w)
    base = ctx.arena.address("k") + STAGED_AT
    for block in cutlass.range_constexpr(HALF_DIMS // BLOCK_DIMS):
        group = (side * HALF_DIMS + block * BLOCK_DIMS) // GROUP_DIMS + quad
        share = share_of(ctx, ((group + 1) * ctx.num_ctas - 1) // DIM_GROUPS)
        for h in cutlass.range_constexpr(THREAD_ROWS):
            first = OF_OUT * BLOCK_DIMS // HALF_DIMS * block + 2 * h
            words = [pack(out[first + 4 * i], out[first + 4 * i + 1], F16_KIND) for i in range(4)]
            words = transpose_quad(words, odd, upper)
            if row + 8 * h < count:
                place = share.first * count + (row + 8 * h) * share.count + group - share.first
                store_words(base + place * GROUP_BYTES, words)


@cute.jit
def send(w: Output, side: cutlass.Constexpr) -> None:
    """A thread for each CTA of the cluster: what is staged for it, and the statistics."""
    ctx = w.ctx
    if cutlass.const_expr(side == 0):
        if ctx.thread < WARP_SIZE:
            # ready: no CTA reads keys any more, where O is to come.
            ctx.barriers("ready").wait(0)
            if ctx.thread < ctx.num_ctas:
                send_to(w, (ctx.rank + ctx.thread) % ctx.num_ctas)


@cute.jit
def send_to(w: Output, peer: Int32) -> None:
    """One thread: two bulk copies to a CTA."""
    ctx = w.ctx
    count, share = rows_of_item(w), share_of(ctx, peer)
    keys, q = ctx.arena.address("k"), ctx.arena.address("q")
    arrived = peer_address(Int32(ctx.barriers("o_full").at().toint()), peer)
    dims_bytes = count * share.count * GROUP_BYTES
    copy_to_peer(
        peer_address(keys + ctx.rank * dims_bytes, peer),
        keys + (STAGED_AT + share.first * count * GROUP_BYTES),
        dims_bytes,
        arrived,
    )
    copy_to_peer(
        peer_address(q + ctx.rank * OF_CTA, peer),
        keys + STATISTICS_AT,
        count * STATISTICS_BYTES,
        arrived,
    )


@cute.jit
def weigh_rows(w: Output, side: cutlass.Constexpr) -> None:
    """The weight of each half of each CTA's rows of O, a thread a row; the first CTA writes lse."""
    ctx = w.ctx
    if cutlass.const_expr(side == 0):
        row, count = ctx.thread, rows_of_item(w)
        if row < count:
            base = ctx.arena.address("q")
            statistics = base + row * STATISTICS_BYTES
            weights = base + (WEIGHTS_AT + row * WEIGHTS_BYTES)
            top = Float32(LEAST)
            for rank in cutlass.range(ctx.num_ctas, unroll=1):
                top = cute.arch.fmax(top, load_words(statistics + rank * OF_CTA, Float32)[0])
            total = Float32(0.0)
            for rank in cutlass.range(ctx.num_ctas, unroll=1):
                words = load_words(statistics + rank * OF_CTA, Float32)
                weight = words[1] * exp2((words[0] - top) * w.scale.factor)
                total += weight
                store_pair(
                    weights + rank * (ROWS * WEIGHTS_BYTES), weight * words[2], weight * words[3]
                )
            factor, lse = factor_and_lse(w, top * w.scale.factor, total, ctx.head + row)
            store_float(base + (FACTORS_AT + row * FP32), factor)
            if ctx.rank == 0:
                (w.lse.iterator + (first_row(w) + row)).store(lse)


@cute.jit
def add_up(w: Output, side: cutlass.Constexpr) -> None:
    """Every row of this CTA's dims: the CTAs' O times their weights, in their order."""
    ctx = w.ctx
    count = rows_of_item(w)
    share = share_of(ctx, ctx.rank)
    base, places = ctx.arena.address("q"), ctx.arena.address("k")
    bytes_of_cta = count * share.count * GROUP_BYTES
    thread = ctx.thread + side * WARPGROUP_SIZE
    for i in cutlass.range(thread, count * share.count, THREADS, unroll=1):
        row = i // share.count
        group = share.first + i - row * share.count
        half = group // (HALF_DIMS // GROUP_DIMS)
        weights = base + (WEIGHTS_AT + row * WEIGHTS_BYTES + half * FP32)
        sums = [Float32(0.0) for _ in range(GROUP_DIMS)]
        for rank in cutlass.range(ctx.num_ctas, unroll=1):
            weight = load_float(weights + rank * (ROWS * WEIGHTS_BYTES))
            words = load_words(places + i * GROUP_BYTES + rank * bytes_of_cta, Int32)
            values = [value for word in range(4) for value in f16_pair(words[word])]
            if weight != 0.0:  # 0 times what a part without a key sends may be NaN
                for d in cutlass.range_constexpr(GROUP_DIMS):
                    sums[d] = sums[d] + weight * values[d]
        factor = load_float(base + (FACTORS_AT + row * FP32))
        words = [Int32(0) for _ in range(GROUP_DIMS // 2)]
        if factor != 0.0:
            words = [
                pack(sums[2 * j] * factor, sums[2 * j + 1] * factor) for j in range(GROUP_DIMS // 2)
            ]
        to = w.out.iterator + ((first_row(w) + row) * D_V + group * GROUP_DIMS)
        cute.arch.inline_ptx(
            "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[to, *words],
        )


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


def f16_pair(word: Any) -> Any:
    """Two f16 as fp32."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


def load_float(address: Any) -> Any:
    """One fp32 of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


def store_pair(address: Any, first: Any, second: Any) -> None:
    """Two fp32 to shared memory."""
    cute.arch.inline_ptx(
        "st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second]
    )
