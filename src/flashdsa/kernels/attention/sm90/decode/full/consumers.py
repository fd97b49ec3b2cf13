"""Roles consumer0 and consumer1: S and P of a tile each, half of O's dims, staged for the cluster.

Each half of a bf16 row of O that is staged has a scale of its own, a power of two, which makes its
largest number one from 2^14 to 2^15; packed rows have no values that are too large.

Q for packed rows: its latent columns in f16, times a power of two for each head.

A row's largest latent number becomes one from 2^14 to 2^15, so that the loss is negligible; the
RoPE columns after them stay bf16, times the same power. Scores are multiplied by `row_unit`, its
inverse.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl import fragments, pipeline, ptx, smem, warp_matrix
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core import gather, results
from flashdsa.kernels.attention.sm90.core.consumers import (
    Registers,
    add_tile0,
    add_tile1,
    compute_next_scores,
    compute_scores,
    compute_scores_in_loop,
    finish_scores,
    issue_others,
    issue_scores,
    merge_sums,
    new_registers,
    p_of,
    values_of,
    wait_for_scores,
)
from flashdsa.kernels.attention.sm90.core.softmax import Rows, Scale, multiply_rows
from flashdsa.kernels.attention.sm90.core.tile import FP32, Q_CHUNK_BYTES, ROWS, TILES
from flashdsa.kernels.attention.sm90.decode.full.gather import NOTHING, Before
from flashdsa.kernels.attention.sm90.decode.shared import combine, plan
from flashdsa.kernels.attention.sm90.decode.shared import words as bits
from flashdsa.kernels.attention.sm90.decode.shared.context import (
    Context,
    Output,
    meet_consumers,
    steps_of,
    takes_part,
    wait_for_extent,
)

QUARTERS = 4
"""Threads of a row."""
UNITS = 8
"""16-byte pieces of a row of a chunk."""
BATCH = 4
"""16-byte pieces that a thread has under way."""
BATCHES = UNITS // BATCH
"""Batches of a chunk."""

MOST_POWER_OF_O = 100


def chunks_of_thread(ctx: Context) -> int:
    """Latent chunks of a thread."""
    return ctx.plan.tile.value_chunks // QUARTERS


def unit_addresses(ctx: Context, row: Any, quarter: Any, batch: Any) -> list[Any]:
    """Addresses of a thread's 16-byte pieces of a batch; a row's threads use different banks."""
    chunk = quarter * chunks_of_thread(ctx) + batch // BATCHES
    base = ctx.memory.q.address() + chunk * Q_CHUNK_BYTES
    first = batch % BATCHES * BATCH
    return [base + swizzled_128(row, (2 * quarter) ^ (first + i)) for i in range(BATCH)]


@cute.jit
def convert_query(ctx: Context, consumer: Any, number: Int32) -> None:
    """Convert Q by both consumers together. All of them have the new form afterwards. The code is
    loops, as code that runs once costs most: it is fetched. `number`: of the items whose Q was
    converted before."""
    thread = ctx.thread + consumer * WARPGROUP_SIZE
    row, quarter = thread // QUARTERS, thread % QUARTERS
    batches = chunks_of_thread(ctx) * BATCHES
    top = Int32(0)
    for batch in cutlass.range(batches, unroll=1):
        for address in unit_addresses(ctx, row, quarter, batch):
            words = smem.load_words(address, Int32)
            for w in range(4):
                size = ptx.word("abs.bf16x2 {$w0}, {$r0};", words[w])
                top = ptx.word("max.bf16x2 {$w0}, {$r0}, {$r1};", top, size)
    top = cutlass.max(top & 0xFFFF, (top >> 16) & 0xFFFF)
    top = fragments.quad_reduce(top, cutlass.max)
    power = cutlass.min(bits.TOP_EXPONENT + bits.BIAS - (top >> 7), Int32(bits.MOST_POWER))
    factor = (power + bits.BIAS) << 7
    factor = factor | (factor << 16)
    for batch in cutlass.range(batches, unroll=1):
        addresses = unit_addresses(ctx, row, quarter, batch)
        units = []
        for address in addresses:
            words = smem.load_words(address, Int32)
            units.append([bits.to_f16(bits.scaled(words[w], factor)) for w in range(4)])
        for address, unit in zip(addresses, units, strict=True):
            smem.store_words(address, unit)
    if cutlass.const_expr(ctx.plan.tile.has_rope):
        rope = ctx.plan.tile.value_chunks
        for i in cutlass.range_constexpr(UNITS // QUARTERS):
            unit = (UNITS // QUARTERS) * quarter + i
            address = ctx.memory.q.address() + rope * Q_CHUNK_BYTES + swizzled_128(row, unit)
            words = smem.load_words(address, Int32)
            smem.store_words(address, [bits.scaled(words[w], factor) for w in range(4)])
    if quarter == 0:
        ctx.memory.row_unit.array(Float32, ROWS)[row] = bits.as_float((bits.BIAS - power) << 23)
    cute.arch.fence_proxy("async.shared", space="cta")
    meet_consumers(ctx.memory.q_converted, number)


@cute.jit
def load_item_query(ctx: Context, q_map: Any) -> None:
    """One thread: load the item's rows of Q; those past the last head become zeros. Nothing is
    loaded if the CTA has no slot. If none of its slots is valid nobody multiplies Q, but both
    consumers wait for it."""
    if ctx.num_steps > 0:
        ctx.memory.q_full.arrive_and_expect_tx()
        gather.load_query(ctx, q_map, [ctx.head, ctx.query])


@cute.jit
def take_query(ctx: Context, consumer: cutlass.Constexpr) -> None:
    """Both consumers, if the CTA has slots: wait for Q, in the form that the products take."""
    if ctx.num_steps > 0:
        ctx.memory.q_full.wait(0)
        if cutlass.const_expr(ctx.plan.packed):
            convert_query(ctx, consumer, Int32(0))


def unscale(ctx: Context, s: Any) -> None:
    """Restore the scores of Q as it was given."""
    shared = ctx.memory.row_unit.array(Float32, ROWS)
    units = [
        shared[fragments.row_of_thread(ctx.thread) + 8 * h] for h in range(fragments.THREAD_ROWS)
    ]
    for i in range(cute.size(s)):
        s[i] = s[i] * units[i // 2 % fragments.THREAD_ROWS]


@cute.jit
def take_tiles0(ctx: Context, r: Registers, scale: Scale, before: Before, num_tiles: Int32) -> None:
    """Consumer 0: take `num_tiles` tiles."""
    if num_tiles > 0:
        first = before.use(0, 0)
        scores_of_tile(ctx, r.s, first, 0)
        finish_scores(ctx, first, 0)
        free_query(ctx, num_tiles <= TILES)
        for step in cutlass.range(steps_of(num_tiles), unroll=1):
            take_step(ctx, r, scale, before, step, num_tiles - step * TILES)
    else:
        if cutlass.const_expr(ctx.plan.stream_k):
            free_query(ctx, Boolean(True))
        else:
            r.out.fill(0.0)


@cute.jit
def scores_of_tile(ctx: Context, s: cute.Tensor, use: Int32, consumer: cutlass.Constexpr) -> None:
    """Compute S of the consumer's tile, by the code that takes the plan less time."""
    tile = ctx.plan.tile
    if cutlass.const_expr(ctx.plan.scores_in_loop):
        compute_scores_in_loop(ctx, s, use, consumer)
    elif cutlass.const_expr(consumer == 0):
        issue_scores(ctx, s, use, True, tile.low_slices + tile.high_slices)
        warpgroup.wait_group(0)
    else:
        compute_scores(ctx, s, use)


def adds_to_others(ctx: Context, step: Any) -> Any:
    """Whether O has a product before a step's first one; of stream-K tiles it is 0 before."""
    return True if ctx.plan.stream_k else step


@cute.jit
def take_step(
    ctx: Context, r: Registers, scale: Scale, before: Before, step: Int32, num_tiles: Int32
) -> None:
    """Consumer 0: take a step after its S; S of the next one is issued after the products.
    `num_tiles`: from this step on. 1: the step has no tile 1."""
    v0, v1 = values_of(ctx, 0, 0), values_of(ctx, 1, 0)
    if cutlass.const_expr(ctx.plan.packed):
        unscale(ctx, r.s)
    add_tile0(ctx, r, scale, v0, adds_to_others(ctx, step))
    if num_tiles > 1:
        ctx.memory.p1_full.wait(ctx.phase(before.use(1, step)))
        issue_others(ctx, r, scale, 1, p_of(ctx, 1), v1)
        if num_tiles > TILES:
            following = before.use(0, step + 1)
            compute_next_scores(ctx, r.s, following, True)
            finish_scores(ctx, following, 0)
            free_query(ctx, num_tiles <= 2 * TILES)
        else:
            warpgroup.wait_group(0)
            if cutlass.const_expr(ctx.plan.stream_k):
                pipeline.arrive_warp(ctx.memory.low_free, 1, ctx.thread)


@cute.jit
def take_tiles1(ctx: Context, r: Registers, scale: Scale, before: Before, num_tiles: Int32) -> None:
    """Consumer 1: take `num_tiles` tiles; its softmax runs during the product with P of tile 0."""
    v1 = values_of(ctx, 1, 1)
    free_query(ctx, num_tiles < TILES)
    for step in cutlass.range(num_tiles // TILES, unroll=1):
        wait_for_scores()
        scores_of_tile(ctx, r.s, before.use(1, step), 1)
        finish_scores(ctx, before.use(1, step), 1)
        free_query(ctx, num_tiles - step * TILES < 2 * TILES)
        issue_tile0(ctx, r, scale, before, step)
        if cutlass.const_expr(ctx.plan.packed):
            unscale(ctx, r.s)
        add_tile1(ctx, r, scale, v1)
    if num_tiles % TILES != 0:
        # The last step has a tile 0 only. A branch in the loop would cost registers.
        wait_for_scores()
        issue_tile0(ctx, r, scale, before, num_tiles // TILES)
        warpgroup.wait_group(0)
        if cutlass.const_expr(ctx.plan.stream_k):
            pipeline.arrive_warp(ctx.memory.high_free, 0, ctx.thread)


@cute.jit
def issue_tile0(ctx: Context, r: Registers, scale: Scale, before: Before, step: Int32) -> None:
    """Consumer 1: issue the product with P of tile 0."""
    ctx.memory.p0_full.wait(ctx.phase(before.use(0, step)))
    p0, v0 = p_of(ctx, 0), values_of(ctx, 0, 1)
    issue_others(ctx, r, scale, 0, p0, v0, adds_to_others(ctx, step))


@cute.jit
def free_query(ctx: Context, is_last: Boolean) -> None:
    """Announce, after the last scores of a stretch of stream-K tiles, that this warp reads neither
    its Q nor its extent any more."""
    if cutlass.const_expr(ctx.plan.stream_k):
        cute.arch.sync_warp()
        if ctx.thread % WARP_SIZE == 0 and is_last:
            ctx.memory.q_free.arrive()


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
    asked: Any = results.ask_sinks(w, combine.rows_of_thread(w)) if ctx.plan.single_cta else None
    if cutlass.const_expr(not ctx.plan.single_cta):
        # The CTAs of the cluster have initialised their barriers: none was sent anything before.
        # All rows of this CTA have come: compute-sanitizer's racecheck lets nobody pass until all
        # threads that arrived are here or have ended, those of the gather among them.
        cute.arch.cluster_wait()
    # Both consumers have read their last keys when it returns.
    sums = merge_sums(ctx, r.rows, w.scale, Int32(0), consumer)
    if cutlass.const_expr(ctx.plan.single_cta):
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
    will send. The other consumer's sums have come."""
    if cutlass.const_expr(consumer == 0):
        # sums0_full: the other warps of this consumer do not read them either.
        w.ctx.memory.sums0_full.wait(0)
        combine.expect_parts(w)


@cute.jit
def stage_share(
    w: Output, r: Registers, sums: list[Float32], units: list[Float32], consumer: cutlass.Constexpr
) -> None:
    """Stage this consumer's half of O, and its statistics."""
    stage_dims(w, r.out, consumer)
    stage_statistics(w.ctx, r.rows, sums, units, consumer)
    # The bulk copies read what threads have staged.
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def write_rows(
    w: Output, r: Registers, sums: list[Float32], asked: list[Int32], consumer: cutlass.Constexpr
) -> None:
    """Write this consumer's half of the item's rows, of a CTA alone, staged where keys were."""
    ctx = w.ctx
    item = combine.rows_of_thread(w)
    factors = results.factors_of_rows(w, r.rows, sums, item, asked, consumer)
    # sums0_full, sums1_full: no warp of either consumer reads keys any more.
    (ctx.memory.sums0_full, ctx.memory.sums1_full)[consumer].wait(0)
    warp_bytes = ctx.plan.tile.half_dims // fragments.BLOCK_DIMS * results.STAGED_BYTES
    warp = consumer * results.WARPS + ctx.thread // WARP_SIZE
    staged = ctx.memory.k.address() + warp * warp_bytes
    results.store_rows(ctx, w.out, r.out, factors, item, consumer, staged, results.STAGED_BYTES)


@cute.jit
def normalise(
    ctx: Context, out: cute.Tensor, sums: list[Float32]
) -> tuple[list[Float32], list[Float32]]:
    """The factors that divide O by the CTA's own sums, 0 of a row without a key, and scale it; and
    the scales that undo the latter."""
    factors, units = [], []
    for h in cutlass.range_constexpr(fragments.THREAD_ROWS):
        factor = cute.arch.rcp_approx(sums[h]) if sums[h] != 0.0 else Float32(0.0)
        unit = Float32(1.0)
        if cutlass.const_expr(not ctx.plan.packed):
            top = Float32(0.0)
            for i in [i for i in range(cute.size(out)) if i // 2 % fragments.THREAD_ROWS == h]:
                top = cute.arch.fmax(top, cute.math.absf(out[i]))
            exponent = (
                bits.bits_of(fragments.quad_reduce(top * factor, cute.arch.fmax)) >> 23
            ) - bits.BIAS
            power = cutlass.min(bits.TOP_EXPONENT - exponent, Int32(MOST_POWER_OF_O))
            factor = factor * bits.power_of_two(power)
            unit = bits.power_of_two(-power)
        factors.append(factor)
        units.append(unit)
    return factors, units


@cute.jit
def stage_dims(w: Output, out: cute.Tensor, consumer: cutlass.Constexpr) -> None:
    """Stage this consumer's groups of dims: an 8x8 matrix is a group's 16 bytes of eight rows."""
    ctx = w.ctx
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    count = combine.staged_rows(w)
    half_groups = ctx.plan.dim_groups // 2
    if warp * fragments.MMA_ROWS < count:
        row = warp * fragments.MMA_ROWS + lane // 8 % 2 * 8 + lane % 8
        group = consumer * half_groups + lane // 16
        to = ctx.memory.k.address() + (
            ctx.plan.staged_at + (group * count + row) * plan.GROUP_BYTES
        )
        for pair in cutlass.range_constexpr(half_groups // 2):
            words = [
                fragments.pack(out[8 * pair + 2 * i], out[8 * pair + 2 * i + 1], fragments.F16_KIND)
                for i in range(4)
            ]
            warp_matrix.store_matrices(to, words)
            to = to + 2 * count * plan.GROUP_BYTES


@cute.jit
def stage_statistics(
    ctx: Context, rows: Rows, sums: list[Float32], units: list[Float32], consumer: cutlass.Constexpr
) -> None:
    """Write this CTA's maxima, sums and this half's scales to its offset among all CTAs'."""
    row = fragments.row_of_thread(ctx.thread)
    if ctx.thread % 4 == 0:
        for h in cutlass.range_constexpr(fragments.THREAD_ROWS):
            to = ctx.memory.q.address() + (
                ctx.rank * plan.CTA_STATISTICS_BYTES + (row + 8 * h) * plan.STATISTICS_BYTES
            )
            if cutlass.const_expr(consumer == 0):
                bits.store_pair(to, rows.out_max[h], sums[h])
            smem.store_float(to + (2 + consumer) * FP32, units[h])
