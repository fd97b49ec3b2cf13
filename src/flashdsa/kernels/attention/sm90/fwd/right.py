"""Role right: S and P of tile 1, and O's dims 256-511 of both tiles."""

from typing import NamedTuple

from cutlass import Boolean, Float32, Int32, cute
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
    Scale,
    exponentiate,
    mask_scores,
    new_rows,
    read_flags,
    rescale_to_others,
    rescale_to_own,
    restart,
    store_p,
)
from flashdsa.kernels.attention.sm90.core.tile import (
    CHUNK_BYTES,
    CHUNKS,
    LAST_OF_ALL,
    LEFT_CHUNKS,
    TILE_BYTES,
)
from flashdsa.kernels.attention.sm90.fwd.context import Context
from flashdsa.kernels.attention.sm90.fwd.epilogue import Output, write_item


class Right(NamedTuple):
    """Reads tile 1, the right half of tile 0, q, P of tile 0. Writes P of tile 1, and results."""

    ctx: Context
    output: Output
    scale: Scale


@cute.jit
def consume_right(role: Right) -> None:
    """Take every step of the CTA; its softmax runs during the product with P of tile 0."""
    ctx = role.ctx
    k0 = ctx.arena.address("k")
    v0 = along_n(k0 + LEFT_CHUNKS * CHUNK_BYTES)
    v1 = along_n(k0 + TILE_BYTES + LEFT_CHUNKS * CHUNK_BYTES)
    p0 = along_k(k0 + (CHUNKS - 1) * CHUNK_BYTES)
    s = cute.make_rmem_tensor(OF_SCORES, Float32)
    p = cute.make_rmem_tensor(P_WORDS, Int32)
    out = cute.make_rmem_tensor(OF_OUT, Float32)
    out.fill(0.0)
    rows = new_rows(ctx.plan.max_logits)
    step, items = Int32(0), Int32(0)

    ctx.barriers("q_full").wait_for(items)
    more = Boolean(True)
    while more:
        # Tile 0's scores come first, so that its softmax runs during these.
        cute.arch.barrier(barrier_id=SCORES_DONE, number_of_threads=2 * WARPGROUP_SIZE)
        compute_scores(ctx, s, step)
        ctx.barriers("notes").wait(ctx.phase(step), 1)
        flags = read_flags(ctx, 1)
        more = flags & LAST_OF_ALL == 0
        if flags != 0:
            arrive_warp(ctx, "q_free")
        ctx.barriers("p0_full").wait_for(step)
        rescale_to_others(ctx, out, rows, role.scale, 0)
        multiply_others(out, p0, v0)
        mask_scores(ctx, s, role.scale, 1)
        exponentiate(s, p, rows, role.scale, ctx.plan.lazy_log2)
        # P of the step before: the other consumer was done with it before p0_full of this one.
        store_p(ctx, p, rows, ctx.arena.address("p"), 1)
        ctx.barriers("p1_full").arrive()
        warpgroup.wait_group(0)
        arrive_warp(ctx, "right_free", 0)
        rescale_to_own(out, rows, role.scale)
        multiply_own(out, p, v1)
        warpgroup.wait_group(0)
        arrive_warp(ctx, "right_free", 1)
        step += 1
        if flags != 0:
            write_item(role.output, out, rows, items, 1)
            restart(rows)
            out.fill(0.0)
            items += 1
            if more:
                ctx.barriers("q_full").wait_for(items)
