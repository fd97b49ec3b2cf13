"""The end of a query: dQ from TMEM through shared memory to global memory, by two warpgroups."""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Int32, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.smem import store_words
from flashdsa.dsl.swizzle import swizzled_64, swizzled_128
from flashdsa.dsl.tmem import wait_then_tcgen05
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.sparse_mla.sm100.bwd.context import Context, load_lane
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import B_H, BOX_DIMS, D_V

UNIT = 8
"""bf16 of one 16-byte move."""


class DqWriter(NamedTuple):
    """Reads dq and dq_rope once dq_ready says that every MMA is done; overlays q."""

    ctx: Context
    dq_map: Any  # (S * 128, 576), boxes of 128 x 64
    dq_rope_map: Any  # the same, boxes of 128 x 32


@cute.jit
def write_box(
    ctx: Context, region: cutlass.Constexpr[str], offset: int, dims: int, at: Int32
) -> None:
    """This thread's head of a box: `dims` columns of TMEM as bf16 to shared memory."""
    words = load_lane(ctx, region, dims, offset).to(BFloat16).bitcast(Int32)
    for unit in cutlass.range_constexpr(dims // UNIT):
        if cutlass.const_expr(dims == BOX_DIMS):
            place = swizzled_128(ctx.thread, unit)
        else:
            place = swizzled_64(ctx.thread, unit)
        store_words(at + place, [words[4 * unit + i] for i in range(4)])


@cute.jit
def write_dq(role: DqWriter, half: cutlass.Constexpr[int]) -> None:
    """Warpgroup `half` of two: two boxes of value dims; the first also the RoPE dims."""
    ctx, plan = role.ctx, role.ctx.plan
    # dq_ready, its only time: every MMA of the CTA is done, so dQ may be read and Q overwritten.
    wait_then_tcgen05(ctx.barriers("dq_ready"), 0)
    boxes = plan.dims // BOX_DIMS
    own = range(half * boxes // 2, (half + 1) * boxes // 2)
    box_bytes = B_H * BOX_DIMS * 2
    for box in own:
        write_box(ctx, "dq", box * BOX_DIMS, BOX_DIMS, ctx.arena.address("dq") + box * box_bytes)
    if cutlass.const_expr(half == 0):
        write_box(
            ctx, "dq_rope", 0, plan.own_rope_dims, ctx.arena.address("dq") + boxes * box_bytes
        )
    # generic writes above -> TMA reads through the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=1 + half, number_of_threads=WARPGROUP_SIZE)
    if ctx.thread == 0:
        row = ctx.item * B_H
        at = ctx.arena.bytes("dq")
        for box in own:
            prims.cp_async_bulk_tensor_global_shared_cta(
                role.dq_map,
                (at + box * box_bytes).to_llvm_ptr(),
                [ctx.cta_rank * plan.dims + box * BOX_DIMS, row],
            )
        if cutlass.const_expr(half == 0):
            prims.cp_async_bulk_tensor_global_shared_cta(
                role.dq_rope_map,
                (at + boxes * box_bytes).to_llvm_ptr(),
                [D_V + ctx.cta_rank * plan.own_rope_dims, row],
            )
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.sync_warp()
