"""Role softmax: thread = lane. Two threads share a row; each computes P of half of a tile's keys.

First Q goes from shared memory to tensor memory, where Q K^T reads it. At the end O over the rows'
sums, lse and maxima go to device memory.

Thread t and thread t ^ 64 have the same row in their lanes of tensor memory, over the dims of the
first and of the second CTA. Each sends the other one its scores of the other one's keys, and adds
what comes. A row's maximum is updated only if it has grown by more than 2^lazy_log2, so that O is
rarely rescaled: P is at most that, and the missing factor cancels between O and the row's sum.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Vector, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl import pipeline, tmem
from flashdsa.dsl.smem import VECTOR, VECTOR_BYTES, load_words, store_words
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm100.core.tile import BF16, BOX_DIMS, PAIR_ROWS
from flashdsa.kernels.attention.sm100.fwd.load import LEADER, Context
from flashdsa.kernels.attention.sm100.fwd.plan import BOX_BYTES, P_STAGES, ROWS

UNIT_DIMS = 8
"""bf16 of 16 bytes."""


def finish_tmem_accesses() -> None:
    """All lanes of a warp: finish their accesses to tensor memory; then one of them arrives at a
    barrier of the pair's first CTA."""
    tmem.before_sync()
    cute.arch.sync_warp()


@cute.jit
def store_units(
    ctx: Context,
    box: Int32,
    first_unit: Int32,
    dims: cutlass.Constexpr[int],
    column: cutlass.Constexpr[int],
) -> None:
    """Store `dims` dims of this thread's row of Q, from a box's `first_unit` on, to its lane."""
    at = ctx.memory.kv.address() + box * BOX_BYTES
    words = []
    for unit in cutlass.range_constexpr(dims // UNIT_DIMS):
        got = load_words(at + swizzled_128(ctx.thread % ROWS, first_unit + unit), Int32)
        words += [got[i] for i in range(VECTOR)]
    tmem.store_lane(ctx.tmem, column, ctx.thread, Vector.from_elements(words, Int32))


@cute.jit
def store_query(ctx: Context) -> None:
    """Store a row of Q (thread = lane): lanes 0 to 63 the first CTA's dims, else the second's."""
    half = ctx.thread // ROWS
    # q_full, its only time: TMA has brought Q, whose bytes the keys overwrite after q_read.
    ctx.memory.q_full.wait_round(0)
    columns = ctx.plan.tmem
    for box in cutlass.range_constexpr(ctx.plan.tile.boxes):
        column = columns.column("q") + box * (BOX_DIMS * BF16 // 4)
        store_units(ctx, half * ctx.plan.tile.boxes + box, Int32(0), BOX_DIMS, column)
    rope_unit = half * (ctx.plan.tile.own_rope_dims // UNIT_DIMS)
    store_units(
        ctx,
        Int32(ctx.plan.q_boxes - 1),
        rope_unit,
        ctx.plan.tile.own_rope_dims,
        columns.column("q_rope"),
    )
    # generic reads above -> the gather writes through the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    if ctx.thread % WARP_SIZE == 0:
        # Every lane of the warp has read its row.
        ctx.memory.q_read.arrive()
    tmem.wait_stored()
    finish_tmem_accesses()
    if ctx.thread % WARP_SIZE == 0:
        ctx.memory.q_stored.arrive_at_peer_for_tmem(LEADER)


NO_KEY = -float("inf")
"""The score of a slot that is not valid."""
LEAST = -3.0e38
"""The maximum of a row without a key: below every score, and minus itself it is 0."""
LEAST_SCALE = 2.0**-124
"""Replaces 0, whose product with NO_KEY would be NaN; times -LEAST it is above lazy_log2."""
CHUNK = 64
"""Columns of O that are rescaled at once."""
ROW_WARPS = 2
"""Warps that have the upper, or the lower, half of the lanes: two times 32 rows."""


class Scale(NamedTuple):
    """Factor from scores to logits in base 2."""

    factor: Float32  # positive
    sign: Float32  # first factor of scores: 1 or -1


class Row(NamedTuple):
    """This thread's row so far."""

    row_max: Float32  # a score, that O and row_sum are against; the same in both threads
    row_sum: Float32  # of P, over this thread's keys
    largest: Float32  # score so far, NO_KEY at first; the same in both threads


class Softmax(NamedTuple):
    """Reads s, writes p, scales o; signals s_free, p_ready, masks_free."""

    ctx: Context
    scale: Scale


@cute.jit
def make_scale(sm_scale_log2: Float32) -> Scale:
    """The scale of logits in base 2: any finite number."""
    magnitude = cute.arch.fmax(sm_scale_log2, -sm_scale_log2)
    sign = Float32(1.0)
    if sm_scale_log2 < 0.0:
        sign = Float32(-1.0)
    return Scale(cute.arch.fmax(magnitude, Float32(LEAST_SCALE)), sign)


def exp2(value: Any) -> Any:
    """2^value; 0 of -inf."""
    return cute.math.exp2(value, fastmath=True)


@cute.jit
def meet(ctx: Context) -> None:
    """Sync the two warps that share rows: each sees what the other wrote to shared memory."""
    if ctx.thread // WARP_SIZE % ROW_WARPS == 0:
        cute.arch.barrier(barrier_id=1, number_of_threads=2 * WARP_SIZE)
    else:
        cute.arch.barrier(barrier_id=2, number_of_threads=2 * WARP_SIZE)


@cute.jit
def whole_scores(ctx: Context, tile: Int32) -> list[Any]:
    """The scores of this thread's half of the keys, over all dims."""
    half = ctx.thread // ROWS
    column = ctx.plan.tmem.column("s")
    # s_ready, time i: Q K^T of tile i is done; the columns may be read until s_free.
    tmem.wait_then_tcgen05(ctx.memory.s_ready, tile)
    first, second = column + (1 - half) * ctx.plan.half_keys, column + half * ctx.plan.half_keys
    others, own = tmem.load_lane_twice(ctx.tmem, first, second, ctx.thread, ctx.plan.half_keys)
    finish_tmem_accesses()
    if ctx.thread % WARP_SIZE == 0:
        ctx.memory.s_free.arrive_at_peer_for_tmem(LEADER)
    at = ctx.memory.partial.address()
    words = others.bitcast(Int32)
    # The other thread read this memory's old words before the maxima of the tile before were
    # exchanged.
    for unit in cutlass.range_constexpr(ctx.plan.half_keys // VECTOR):
        store_words(
            at + swizzled_128(ctx.thread, unit), [words[VECTOR * unit + i] for i in range(VECTOR)]
        )
    meet(ctx)
    sums = []
    for unit in cutlass.range_constexpr(ctx.plan.half_keys // VECTOR):
        got = load_words(at + swizzled_128(ctx.thread ^ ROWS, unit), Float32)
        sums += [own[VECTOR * unit + i] + got[i] for i in range(VECTOR)]
    return sums


@cute.jit
def read_mask(ctx: Context, tile: Int32) -> Int32:
    """Bit k: this row's query has key k of this thread's half of the tile."""
    group = ctx.plan.group
    ring = pipeline.RingConsumer(ctx.memory.masks_full, ctx.memory.masks_free)
    at = ring.state(tile)
    # masks_full, use i: the load warp has written the tile's words; they stay until masks_free.
    ring.wait(at)
    word = at.stage * (group * ctx.plan.tile.mask_words) + ctx.thread // ROWS
    if cutlass.const_expr(group > 1):
        word += (
            (ctx.cta_rank * ROWS + ctx.thread % ROWS)
            // ctx.plan.group_heads
            * ctx.plan.tile.mask_words
        )
    mask = (ctx.memory.masks.pointer(Int32) + word).load()
    cute.arch.sync_warp()
    if ctx.thread % WARP_SIZE == 0:
        ring.release(at.stage)
    return mask


@cute.jit
def row_maximum(ctx: Context, scores: list[Any]) -> Float32:
    """Maximum over all keys of the tile, of both threads of the row."""
    top = scores[0]
    for score in scores[1:]:
        top = cute.arch.fmax(top, score)
    maxima = ctx.memory.maxima.pointer(Float32)
    # The other thread read this memory's old words before it came to this tile's first meeting.
    (maxima + ctx.thread).store(top)
    meet(ctx)
    return cute.arch.fmax(top, (maxima + (ctx.thread ^ ROWS)).load())


@cute.jit
def rescale(ctx: Context, tile: Int32, factor: Float32) -> None:
    """Multiply this thread's lane of O by a factor, if any lane's of the warp is not 1."""
    if tile > 0:
        if cute.arch.vote_any_sync(factor != 1.0):
            # p_free of the tile before: its P V is added to O, and no other one comes before
            # p_ready of this tile.
            tmem.wait_then_tcgen05(ctx.memory.p_free, tile - 1)
            column = ctx.plan.tmem.column("o")
            for first in cutlass.range_constexpr(0, ctx.plan.tile.dims, CHUNK):
                values = tmem.load_lane(ctx.tmem, column + first, ctx.thread, CHUNK)
                scaled = [values[i] * factor for i in range(CHUNK)]
                words = Vector.from_elements(scaled, Float32).bitcast(Int32)
                tmem.store_lane(ctx.tmem, column + first, ctx.thread, words)
            tmem.wait_stored()


@cute.jit
def store_p(ctx: Context, tile: Int32, p: list[Any]) -> None:
    """Store P of this thread's half of the keys, in bf16: 64 bytes of its row."""
    ring = pipeline.RingProducer(ctx.memory.p_ready, ctx.memory.p_free)
    to = ring.state(tile)
    # p_free of the tile before in this stage: its P V, which reads P, is done.
    ring.acquire(to)
    words = Vector.from_elements(p, Float32).to(BFloat16).bitcast(Int32)
    at = ctx.memory.p.address() + to.stage * BOX_BYTES
    units = ctx.plan.half_keys // (2 * VECTOR)
    for unit in cutlass.range_constexpr(units):
        place = swizzled_128(ctx.thread % ROWS, ctx.thread // ROWS * units + unit)
        store_words(at + place, [words[VECTOR * unit + i] for i in range(VECTOR)])
    # generic writes above -> tcgen05.mma reads through the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def softmax_tile(role: Softmax, tile: Int32, row: Row) -> Row:
    """Compute P of a tile; return the row with the tile's keys."""
    ctx, scale = role.ctx, role.scale
    sums = whole_scores(ctx, tile)
    mask = read_mask(ctx, tile)
    scores = []
    for key in cutlass.range_constexpr(ctx.plan.half_keys):
        score = sums[key] * scale.sign
        if (mask >> key) & 1 == 0:
            score = Float32(NO_KEY)
        scores.append(score)
    top = row_maximum(ctx, scores)
    new = row.row_max
    if (top - new) * scale.factor > ctx.plan.lazy_log2:
        new = top
    # Differences are scaled, not scores: they are exact near the maximum, however large it is.
    factor = exp2((row.row_max - new) * scale.factor)
    total = row.row_sum * factor
    p = []
    for key in cutlass.range_constexpr(ctx.plan.half_keys):
        p.append(exp2((scores[key] - new) * scale.factor))
        total += p[key]
    store_p(ctx, tile, p)
    rescale(ctx, tile, factor)
    tmem.before_sync()
    cute.arch.sync_warp()
    if ctx.thread % WARP_SIZE == 0:
        # p_ready, time i: O of this warp's lanes in tensor memory, and P in the CTA's own shared
        # memory, which is all that is released, are ready for P V.
        ctx.memory.p_ready.arrive_at_peer_for_shared(LEADER, tile % P_STAGES)
    return Row(new, total, cute.arch.fmax(row.largest, top))


@cute.jit
def softmax_all(role: Softmax) -> Row:
    """Take every tile of the item; return the row."""
    row = Row(Float32(LEAST), Float32(0.0), Float32(NO_KEY))
    for tile in cutlass.range(role.ctx.num_tiles, unroll=1):
        row = softmax_tile(role, tile, row)
    return row


LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
NAMED_BARRIER = 3
"""Named barrier after the two of `meet`."""


class Output(NamedTuple):
    """Destination of the results."""

    ctx: Context
    out_map: Any  # (S * H, 512) bf16, boxes of 64 x 64
    lse: cute.Tensor  # (S, H) fp32
    max_logits: cute.Tensor  # (S * H,) fp32, or (0,): not asked for
    attn_sink: cute.Tensor  # (H,) fp32, or (0,): none
    scale: Scale


@cute.jit
def finish_row(w: Output, row: Row) -> Float32:
    """Return the factor of O, 0 where the row has no key; one of the row's threads stores lse and,
    if it is asked for, the largest logit."""
    ctx = w.ctx
    # The sum over both threads of the row. The other one read the scores that lie here before the
    # last maxima were exchanged.
    sums = ctx.memory.partial.pointer(Float32)
    (sums + ctx.thread * ctx.plan.half_keys).store(row.row_sum)
    meet(ctx)
    total = row.row_sum + (sums + (ctx.thread ^ ROWS) * ctx.plan.half_keys).load()
    of_item = ctx.cta_rank * ROWS + ctx.thread % ROWS
    number = Int64(ctx.item) * PAIR_ROWS + of_item
    present = number < Int64(w.lse.shape[0]) * w.lse.shape[1]
    factor, lse = Float32(0.0), Float32(float("inf"))
    if total != 0.0:
        top = row.row_max * w.scale.factor
        lse = (top + cute.math.log2(total, fastmath=True)) * LN_2
        factor = cute.arch.rcp_approx(total)
        if w.attn_sink.shape[0] > 0 and present:
            sink = (w.attn_sink.iterator + of_item % ctx.plan.group_heads).load()
            factor = cute.arch.rcp_approx(total + exp2(sink * LOG2_E - top))
            if sink == float("inf"):
                factor = Float32(0.0)  # of a sum that is NaN too
    if present and ctx.thread < ROWS:
        (w.lse.iterator + number).store(lse)
        if w.max_logits.shape[0] > 0:
            largest = row.largest * w.scale.factor * LN_2
            (w.max_logits.iterator + number).store(largest)
    return factor


@cute.jit
def write_box(ctx: Context, box: cutlass.Constexpr[int], factor: Float32, at: Int32) -> None:
    """Write 64 dims of this thread's row of O, in bf16, to a box in shared memory."""
    column = ctx.plan.tmem.column("o") + box * BOX_DIMS
    values = tmem.load_lane(ctx.tmem, column, ctx.thread, BOX_DIMS)
    scaled = [values[i] * factor for i in range(BOX_DIMS)]
    words = Vector.from_elements(scaled, Float32).to(BFloat16).bitcast(Int32)
    kept = Int32(-1)
    if factor == 0.0:
        kept = Int32(0)  # O may be NaN then
    for unit in cutlass.range_constexpr(BOX_DIMS * BF16 // VECTOR_BYTES):
        place = swizzled_128(ctx.thread % ROWS, unit)
        store_words(at + place, [words[VECTOR * unit + i] & kept for i in range(VECTOR)])


@cute.jit
def write_rows(w: Output, row: Row) -> None:
    """Write O and lse of the CTA's rows, up to the last row."""
    ctx = w.ctx
    factor = finish_row(w, row)
    if ctx.num_tiles > 1:
        # Nothing else may have waited for it, and it must not arrive after this CTA's end.
        ctx.memory.p_free.wait_for(ctx.num_tiles - 2)
    # p_free of the last tile: every product is done in both CTAs, so O may be read, and the bytes
    # of the keys overwritten.
    tmem.wait_then_tcgen05(ctx.memory.p_free, ctx.num_tiles - 1)
    first_box = ctx.thread // ROWS * ctx.plan.tile.boxes
    for box in cutlass.range_constexpr(ctx.plan.tile.boxes):
        write_box(ctx, box, factor, ctx.memory.kv.address() + (first_box + box) * BOX_BYTES)
    # generic writes above -> TMA reads through the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=NAMED_BARRIER, number_of_threads=WARPGROUP_SIZE)
    if ctx.thread == 0:
        first_row = ctx.item * PAIR_ROWS + ctx.cta_rank * ROWS
        for box in cutlass.range_constexpr(ctx.plan.tile.d_v // BOX_DIMS):
            prims.cp_async_bulk_tensor_global_shared_cta(
                w.out_map,
                (ctx.memory.kv.bytes() + box * BOX_BYTES).to_llvm_ptr(),
                [Int32(box * BOX_DIMS), first_row],
            )
        cute.arch.cp_async_bulk_commit_group()
        # They have been read; the grid's end waits until they have been written.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()
