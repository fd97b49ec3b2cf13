"""Role left: S and P of tile 0, and O's dims 0-255 of both tiles."""

from typing import NamedTuple

from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.wgmma import along_k, along_n
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.consumers import (
    P_FREE,
    SCORES_DONE,
    arrive_warp,
    issue_scores,
)
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
    LAST_OF_ITEM,
    LEFT_PIECES,
    RIGHT_PIECES,
    TILE_BYTES,
)
from flashdsa.kernels.attention.sm90.fwd.context import Context
from flashdsa.kernels.attention.sm90.fwd.epilogue import Output, write_item


class Left(NamedTuple):
    """Reads tile 0, the left half of tile 1, q, P of tile 1. Writes P of tile 0, and results."""

    ctx: Context
    output: Output
    scale: Scale


@cute.jit
def finish_scores(ctx: Context, step: Int32) -> None:
    """Announce that all of the step's S is computed: tile 1's may follow, and after the item's last
    step its Q."""
    cute.arch.barrier_arrive(barrier_id=SCORES_DONE, number_of_threads=2 * WARPGROUP_SIZE)
    ctx.barriers("notes").wait(ctx.phase(step), 0)
    if read_flags(ctx, 0) != 0:
        arrive_warp(ctx, "q_free")


@cute.jit
def consume_left(role: Left) -> None:
    """Take every step of the CTA; S of the next step is issued after this one's last product."""
    ctx = role.ctx
    k0 = ctx.arena.address("k")
    v0, v1 = along_n(k0), along_n(k0 + TILE_BYTES)
    p1 = along_k(ctx.arena.address("p"))
    s = cute.make_rmem_tensor(OF_SCORES, Float32)
    p = cute.make_rmem_tensor(P_WORDS, Int32)
    out = cute.make_rmem_tensor(OF_OUT, Float32)
    out.fill(0.0)
    rows = new_rows(ctx.plan.max_logits)
    step, items = Int32(0), Int32(0)

    ctx.barriers("q_full").wait_for(items)
    issue_scores(ctx, s, step, True, LEFT_PIECES + RIGHT_PIECES)
    warpgroup.wait_group(0)
    finish_scores(ctx, step)
    more = Boolean(True)
    while more:
        flags = read_flags(ctx, 0)
        more = flags & LAST_OF_ALL == 0
        mask_scores(ctx, s, role.scale, 0)
        exponentiate(s, p, rows, role.scale, ctx.plan.lazy_log2)
        # P overwrites tile 0's RoPE chunk: all four warps have their scores.
        cute.arch.barrier(barrier_id=P_FREE, number_of_threads=WARPGROUP_SIZE)
        store_p(ctx, p, rows, k0 + (CHUNKS - 1) * CHUNK_BYTES, 0)
        ctx.barriers("p0_full").arrive()
        rescale_to_own(out, rows, role.scale)
        multiply_own(out, p, v0)
        warpgroup.wait_group(0)
        arrive_warp(ctx, "left_free", 0)
        ctx.barriers("p1_full").wait_for(step)
        rescale_to_others(ctx, out, rows, role.scale, 1)
        multiply_others(out, p1, v1)
        step += 1
        if flags == LAST_OF_ITEM:
            ctx.barriers("q_full").wait_for(items + 1)
        issue_scores(ctx, s, step, more, LEFT_PIECES)
        warpgroup.wait_group(1)
        arrive_warp(ctx, "left_free", 1)
        issue_scores(ctx, s, step, more, RIGHT_PIECES)
        warpgroup.wait_group(0)
        if more:
            finish_scores(ctx, step)
        if flags != 0:
            write_item(role.output, out, rows, items, 0)
            restart(rows)
            out.fill(0.0)
            items += 1
