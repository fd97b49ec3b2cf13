"""The step from S to P: masks, row maxima and sums, and the rescaling of O. Exponents are of base
2.

A row's maximum is updated only if it has grown by more than 2^lazy_log2, so that O is rarely
rescaled. P is at most that, and the missing factor cancels between O and the row's sum.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from flashdsa.dsl import fragments, warp_matrix
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.context import StepContext
from flashdsa.kernels.attention.sm90.core.tile import ROWS, TILES
from flashdsa.plan.row_tiles import ROW_BYTES

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
NO_KEY = -float("inf")
"""The score of a slot that is not valid."""
LEAST = -3.0e38
"""The maximum of a row without a key: below every score, and minus itself it is 0."""
LEAST_SCALE = 2.0**-124
"""Replaces 0, whose product with NO_KEY would be NaN; times -LEAST it is above lazy_log2."""


class Scale(NamedTuple):
    """Factor from scores to logits in base 2."""

    factor: Float32  # positive
    negative: Boolean  # whether scores are to be negated first


class Rows(NamedTuple):
    """This thread's two rows, `row_of_thread` and 8 below, in registers."""

    row_max: cute.Tensor  # (2,) fp32, a score: that row_sum is against
    row_sum: cute.Tensor  # (2,) fp32: over this thread's columns of this consumer's tiles
    out_max: cute.Tensor  # (2,) fp32, a score: that O is against
    largest: Any = None  # (2,) fp32: the largest score of this consumer's tiles; None: not asked


def make_scale(sm_scale: Float32) -> Scale:
    """The scale of logits, log2: any finite number."""
    magnitude = cute.arch.fmax(sm_scale, -sm_scale)
    return Scale(cute.arch.fmax(magnitude, Float32(LEAST_SCALE)), sm_scale < 0.0)


def new_rows(with_largest: bool = False) -> Rows:
    """Rows without a key."""
    count = len(Rows._fields) if with_largest else len(Rows._fields) - 1
    rows = Rows(*(cute.make_rmem_tensor(fragments.THREAD_ROWS, Float32) for _ in range(count)))
    restart(rows)
    return rows


def restart(rows: Rows) -> None:
    """Forget every key."""
    rows.row_max.fill(LEAST)
    rows.row_sum.fill(0.0)
    rows.out_max.fill(LEAST)
    if rows.largest is not None:
        rows.largest.fill(NO_KEY)


def read_masks(ctx: StepContext, tile: int) -> list[list[Int32]]:
    """Bits of the tile's valid keys, for each of the thread's rows."""
    group, mask_words = ctx.plan.group, ctx.plan.tile.mask_words
    masks = ctx.memory.masks.array(Int32, TILES * group * mask_words)
    found: list[list[Int32]] = []
    for h in range(fragments.THREAD_ROWS):
        query = (
            (fragments.row_of_thread(ctx.thread) + 8 * h) // ctx.plan.group_heads
            if group > 1
            else 0
        )
        first = (tile * group + query) * mask_words
        if h > 0 and ctx.plan.group_heads >= fragments.MMA_ROWS:
            found.append(found[0])  # both rows are of one query
        else:
            found.append([masks[first + word] for word in range(mask_words)])
    return found


@cute.jit
def mask_scores(ctx: StepContext, s: cute.Tensor, scale: Scale, tile: cutlass.Constexpr) -> None:
    """Set scores of keys that are not valid to NO_KEY; apply the scale's sign."""
    masks = read_masks(ctx, tile)
    every = Int32(-1)
    for words in masks:
        for word in words:
            every = every & word
    if every != -1 or scale.negative:
        first = ctx.thread % 4 * 2
        sign = Float32(-1.0) if scale.negative else Float32(1.0)
        for i in cutlass.range_constexpr(cute.size(s)):
            column = i // 4 * 8 + i % 2
            word = masks[i // 2 % fragments.THREAD_ROWS][column // 32]
            s[i] = s[i] * sign
            if (word >> (first + column % 32)) & 1 == 0:
                s[i] = Float32(NO_KEY)


@cute.jit
def exponentiate(
    s: cute.Tensor,
    p: cute.Tensor,
    rows: Rows,
    scale: Scale,
    lazy_log2: cutlass.Constexpr,
    kind: cutlass.Constexpr = fragments.BF16_KIND,
) -> None:
    """Compute P in words of two bf16, or of two of `kind`, against each row's maximum, which may
    move. The sums follow. Differences are scaled, not scores: they are exact near the maximum,
    however large it is. The code has no branch: one more, never taken, cost 3% of the kernel's
    time."""
    for h in cutlass.range_constexpr(fragments.THREAD_ROWS):
        of_row = [i for i in range(cute.size(s)) if i // 2 % fragments.THREAD_ROWS == h]
        top = s[of_row[0]]
        for i in of_row[1:]:
            top = cute.arch.fmax(top, s[i])
        top = fragments.quad_reduce(top, cute.arch.fmax)
        if cutlass.const_expr(rows.largest is not None):
            rows.largest[h] = cute.arch.fmax(rows.largest[h], top)
        old = rows.row_max[h]
        new = top if (top - old) * scale.factor > lazy_log2 else old
        total = rows.row_sum[h] * fragments.exp2((old - new) * scale.factor)
        for i in of_row:
            s[i] = fragments.exp2((s[i] - new) * scale.factor)
            total += s[i]
        rows.row_max[h], rows.row_sum[h] = new, total
    for word in cutlass.range_constexpr(cute.size(p)):
        p[word] = fragments.pack(s[2 * word], s[2 * word + 1], kind)


@cute.jit
def store_p(ctx: StepContext, p: Any, rows: Rows, address: Any, tile: cutlass.Constexpr) -> None:
    """Store P to a swizzled chunk in shared memory, and its maxima."""
    lane = ctx.thread % WARP_SIZE
    row = ctx.thread // WARP_SIZE * fragments.MMA_ROWS + lane % fragments.MMA_ROWS
    for block in cutlass.range_constexpr(ctx.plan.tile.keys // fragments.MMA_ROWS):
        unit = (2 * block + lane // fragments.MMA_ROWS) ^ (lane % 8)
        words = [p[4 * block + i] for i in range(4)]
        warp_matrix.store_matrices(address + row * ROW_BYTES + unit * 16, words)
    if lane % 4 == 0:
        maxima = ctx.memory.row_max.array(Float32, TILES * ROWS)
        for h in cutlass.range_constexpr(fragments.THREAD_ROWS):
            maxima[tile * ROWS + fragments.row_of_thread(ctx.thread) + 8 * h] = rows.row_max[h]
    # wgmma of the other consumer reads P: the generic proxy's writes are fenced by who wrote them.
    cute.arch.fence_proxy("async.shared", space="cta")


def multiply_rows(out: Any, factors: Any) -> None:
    """Multiply O by a factor for each of the thread's rows."""
    for i in range(cute.size(out)):
        out[i] = out[i] * factors[i // 2 % fragments.THREAD_ROWS]


@cute.jit
def rescale(out: cute.Tensor, rows: Rows, new: Any, scale: Scale) -> None:
    """Rescale O to the maxima `new` of the next P; they are never below its own. O of a row without
    a key is 0, or is not read: it stays, so that an item's first tile runs no code that later ones
    do not."""
    factors = []
    for h in cutlass.range_constexpr(fragments.THREAD_ROWS):
        factor = fragments.exp2((rows.out_max[h] - new[h]) * scale.factor)
        factors.append(Float32(1.0) if rows.out_max[h] == LEAST else factor)
    if cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
        multiply_rows(out, factors)
    for h in cutlass.range_constexpr(fragments.THREAD_ROWS):
        rows.out_max[h] = new[h]


def rescale_to_own(out: Any, rows: Rows, scale: Scale) -> None:
    """Rescale O to this consumer's maxima."""
    rescale(out, rows, [rows.row_max[h] for h in range(fragments.THREAD_ROWS)], scale)


def rescale_to_others(ctx: StepContext, out: Any, rows: Rows, scale: Scale, tile: int) -> None:
    """Rescale O to the maxima of the other consumer's P; this one's become no less."""
    maxima = ctx.memory.row_max.array(Float32, TILES * ROWS)
    first = tile * ROWS + fragments.row_of_thread(ctx.thread)
    theirs = [maxima[first + 8 * h] for h in range(fragments.THREAD_ROWS)]
    rescale(out, rows, theirs, scale)
    for h in range(fragments.THREAD_ROWS):
        new = cute.arch.fmax(rows.row_max[h], theirs[h])
        rows.row_sum[h] = rows.row_sum[h] * fragments.exp2((rows.row_max[h] - new) * scale.factor)
        rows.row_max[h] = new
