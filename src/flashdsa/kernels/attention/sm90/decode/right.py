"""Role right: S and P of tile 1, and O's dims 256-511 of both tiles."""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.wgmma import along_k, along_n
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.consumers import SCORES_DONE, arrive_warp, compute_scores
from flashdsa.kernels.attention.sm90.core.products import (
    OF_OUT,
    OF_SCORES,
    P_WORDS,
    multiply_others,
    multiply_own,
)
from flashdsa.kernels.attention.sm90.core.softmax import (
    Rows,
    Scale,
    exponentiate,
    mask_scores,
    new_rows,
    rescale_to_others,
    rescale_to_own,
    store_p,
)
from flashdsa.kernels.attention.sm90.core.tile import (
    CHUNK_BYTES,
    CHUNKS,
    LEFT_CHUNKS,
    TILE_BYTES,
    TILES,
)
from flashdsa.kernels.attention.sm90.decode.combine import stage_share
from flashdsa.kernels.attention.sm90.decode.context import (
    Context,
    Output,
    wait_for_extent,
)
from flashdsa.kernels.attention.sm90.decode.query import (
    take_query,
    unscale,
)


class Right(NamedTuple):
    """Reads tile 1, the right half of tile 0, q, P of tile 0. Writes P of tile 1, and results."""

    ctx: Context
    output: Output
    scale: Scale


def wait_for_scores() -> None:
    """Wait for tile 0's scores, so that its softmax runs during this consumer's."""
    cute.arch.barrier(barrier_id=SCORES_DONE, number_of_threads=2 * WARPGROUP_SIZE)


@cute.jit
def issue_others(role: Right, out: cute.Tensor, rows: Rows, step: Int32) -> None:
    """Issue O += P0 V0 as one group, against tile 0's maxima."""
    ctx = role.ctx
    k0 = ctx.arena.address("k")
    ctx.barriers("p0_full").wait(ctx.phase(step))
    rescale_to_others(ctx, out, rows, role.scale, 0)
    p0 = along_k(k0 + (CHUNKS - 1) * CHUNK_BYTES)
    multiply_others(out, p0, along_n(k0 + LEFT_CHUNKS * CHUNK_BYTES), ctx.kind)


@cute.jit
def consume_right(role: Right) -> None:
    """Take every step of the CTA; its softmax runs during the product with P of tile 0."""
    ctx = role.ctx
    v1 = along_n(ctx.arena.address("k") + (TILE_BYTES + LEFT_CHUNKS * CHUNK_BYTES))
    s = cute.make_rmem_tensor(OF_SCORES, Float32)
    p = cute.make_rmem_tensor(P_WORDS, Int32)
    out = cute.make_rmem_tensor(OF_OUT, Float32)
    out.fill(0.0)
    rows = new_rows()
    take_query(ctx, 1)
    num_tiles = wait_for_extent(ctx)
    if num_tiles > 0:
        for step in cutlass.range(num_tiles // TILES, unroll=1):
            wait_for_scores()
            compute_scores(ctx, s, step)
            ctx.barriers("notes").wait(ctx.phase(step), 1)
            issue_others(role, out, rows, step)
            if cutlass.const_expr(ctx.plan.packed):
                unscale(ctx, s)
            mask_scores(ctx, s, role.scale, 1)
            exponentiate(s, p, rows, role.scale, ctx.plan.lazy_log2, ctx.kind)
            # P of the step before: the other consumer was done with it before p0_full of this one.
            store_p(ctx, p, rows, ctx.arena.address("p"), 1)
            ctx.barriers("p1_full").arrive()
            warpgroup.wait_group(0)
            arrive_warp(ctx, "right_free", 0)
            rescale_to_own(out, rows, role.scale)
            multiply_own(out, p, v1, ctx.kind)
            warpgroup.wait_group(0)
            arrive_warp(ctx, "right_free", 1)
        if num_tiles % TILES != 0:
            # The CTA's last step has a tile 0 only. A branch in the loop would cost registers.
            wait_for_scores()
            issue_others(role, out, rows, num_tiles // TILES)
            warpgroup.wait_group(0)
    stage_share(role.output, out, rows, 1)
