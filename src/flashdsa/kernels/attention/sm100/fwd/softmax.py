"""Role softmax: thread = lane. Two threads share a row; each computes P of half of a tile's keys.

Thread t and thread t ^ 64 have the same row in their lanes of tensor memory, over the dims of the
first and of the second CTA. Each sends the other one its scores of the other one's keys, and adds
what comes. A row's maximum is updated only if it has grown by more than 2^lazy_log2, so that O is
rarely rescaled: P is at most that, and the missing factor cancels between O and the row's sum.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Vector, cute

from flashdsa.dsl import tmem
from flashdsa.dsl.smem import VECTOR, load_words, store_words
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.dsl.tmem import wait_then_tcgen05
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm100.fwd.context import LEADER, Context
from flashdsa.kernels.attention.sm100.fwd.plan import (
    BOX_BYTES,
    DIMS,
    HALF_KEYS,
    MASK_WORDS,
    P_STAGES,
    ROWS,
)
from flashdsa.kernels.attention.sm100.fwd.query import arrive_at_leader

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
    wait_then_tcgen05(ctx.barriers("s_ready"), tile)
    first, second = column + (1 - half) * HALF_KEYS, column + half * HALF_KEYS
    others, own = tmem.load_lane_twice(ctx.tmem, first, second, ctx.thread, HALF_KEYS)
    arrive_at_leader(ctx, "s_free")
    at = ctx.arena.address("partial")
    words = others.bitcast(Int32)
    # The other thread read this memory's old words before the maxima of the tile before were
    # exchanged.
    for unit in cutlass.range_constexpr(HALF_KEYS // VECTOR):
        store_words(
            at + swizzled_128(ctx.thread, unit), [words[VECTOR * unit + i] for i in range(VECTOR)]
        )
    meet(ctx)
    sums = []
    for unit in cutlass.range_constexpr(HALF_KEYS // VECTOR):
        got = load_words(at + swizzled_128(ctx.thread ^ ROWS, unit), Float32)
        sums += [own[VECTOR * unit + i] + got[i] for i in range(VECTOR)]
    return sums


@cute.jit
def read_mask(ctx: Context, tile: Int32) -> Int32:
    """Bit k: this row's query has key k of this thread's half of the tile."""
    group = ctx.plan.group
    ring = ctx.arena.consumer("masks_full", "masks_free")
    at = ring.state(tile)
    # masks_full, use i: the load warp has written the tile's words; they stay until masks_free.
    ring.wait(at)
    word = at.stage * (group * MASK_WORDS) + ctx.thread // ROWS
    if cutlass.const_expr(group > 1):
        word += (ctx.cta_rank * ROWS + ctx.thread % ROWS) // ctx.plan.group_heads * MASK_WORDS
    mask = (ctx.arena.pointer("masks", Int32) + word).load()
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
    maxima = ctx.arena.pointer("maxima", Float32)
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
            wait_then_tcgen05(ctx.barriers("p_free"), tile - 1)
            column = ctx.plan.tmem.column("o")
            for first in cutlass.range_constexpr(0, DIMS, CHUNK):
                values = tmem.load_lane(ctx.tmem, column + first, ctx.thread, CHUNK)
                scaled = [values[i] * factor for i in range(CHUNK)]
                words = Vector.from_elements(scaled, Float32).bitcast(Int32)
                tmem.store_lane(ctx.tmem, column + first, ctx.thread, words)
            tmem.wait_stored()


@cute.jit
def store_p(ctx: Context, tile: Int32, p: list[Any]) -> None:
    """Store P of this thread's half of the keys, in bf16: 64 bytes of its row."""
    ring = ctx.arena.producer("p_ready", "p_free")
    to = ring.state(tile)
    # p_free of the tile before in this stage: its P V, which reads P, is done.
    ring.acquire(to)
    words = Vector.from_elements(p, Float32).to(BFloat16).bitcast(Int32)
    at = ctx.arena.address("p") + to.stage * BOX_BYTES
    units = HALF_KEYS // (2 * VECTOR)
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
    for key in cutlass.range_constexpr(HALF_KEYS):
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
    for key in cutlass.range_constexpr(HALF_KEYS):
        p.append(exp2((scores[key] - new) * scale.factor))
        total += p[key]
    store_p(ctx, tile, p)
    rescale(ctx, tile, factor)
    tmem.before_sync()
    cute.arch.sync_warp()
    if ctx.thread % WARP_SIZE == 0:
        # p_ready, time i: O of this warp's lanes in tensor memory, and P in the CTA's own shared
        # memory, which is all that is released, are ready for P V.
        ctx.barriers("p_ready").arrive_at_peer_for_shared(LEADER, tile % P_STAGES)
    return Row(new, total, cute.arch.fmax(row.largest, top))


@cute.jit
def softmax_all(role: Softmax) -> Row:
    """Take every tile of the item; return the row."""
    row = Row(Float32(LEAST), Float32(0.0), Float32(NO_KEY))
    for tile in cutlass.range(role.ctx.num_tiles, unroll=1):
        row = softmax_tile(role, tile, row)
    return row
