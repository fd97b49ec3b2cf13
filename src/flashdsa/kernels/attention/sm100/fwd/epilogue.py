"""The end of role softmax: O over the rows' sums, lse and maxima, to device memory."""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Vector, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl import tmem
from flashdsa.dsl.smem import VECTOR, VECTOR_BYTES, store_words
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.dsl.tmem import wait_then_tcgen05
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm100.fwd.context import Context
from flashdsa.kernels.attention.sm100.fwd.plan import (
    BF16,
    BOX_BYTES,
    BOX_DIMS,
    D_V,
    HALF_KEYS,
    PAIR_ROWS,
    ROWS,
    VALUE_BOXES,
)
from flashdsa.kernels.attention.sm100.fwd.softmax import Row, Scale, exp2, meet

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
def whole_sum(ctx: Context, own: Float32) -> Float32:
    """Sum over both threads of the row."""
    # The other thread read the scores that lie here before the last maxima were exchanged.
    sums = ctx.arena.pointer("partial", Float32)
    (sums + ctx.thread * HALF_KEYS).store(own)
    meet(ctx)
    return own + (sums + (ctx.thread ^ ROWS) * HALF_KEYS).load()


@cute.jit
def finish_row(w: Output, row: Row) -> Float32:
    """Return the factor of O, 0 where the row has no key; one of the row's threads stores lse and,
    if it is asked for, the largest logit."""
    ctx = w.ctx
    total = whole_sum(ctx, row.row_sum)
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
        ctx.barriers("p_free").wait_for(ctx.num_tiles - 2)
    # p_free of the last tile: every product is done in both CTAs, so O may be read, and the bytes
    # of the keys overwritten.
    wait_then_tcgen05(ctx.barriers("p_free"), ctx.num_tiles - 1)
    first_box = ctx.thread // ROWS * VALUE_BOXES
    for box in cutlass.range_constexpr(VALUE_BOXES):
        write_box(ctx, box, factor, ctx.arena.address("kv") + (first_box + box) * BOX_BYTES)
    # generic writes above -> TMA reads through the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=NAMED_BARRIER, number_of_threads=WARPGROUP_SIZE)
    if ctx.thread == 0:
        first_row = ctx.item * PAIR_ROWS + ctx.cta_rank * ROWS
        for box in cutlass.range_constexpr(D_V // BOX_DIMS):
            prims.cp_async_bulk_tensor_global_shared_cta(
                w.out_map,
                (ctx.arena.bytes("kv") + box * BOX_BYTES).to_llvm_ptr(),
                [Int32(box * BOX_DIMS), first_row],
            )
        cute.arch.cp_async_bulk_commit_group()
        # They have been read; the grid's end waits until they have been written.
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.sync_warp()
