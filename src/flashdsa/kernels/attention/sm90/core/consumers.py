"""Both consumers of a step: issue its scores, announce them, merge the sums of an item."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.fragments import THREAD_ROWS, exp2, quad_reduce, row_of_thread
from flashdsa.dsl.wgmma import along_k
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.products import (
    multiply_scores,
)
from flashdsa.kernels.attention.sm90.core.softmax import (
    Rows,
    Scale,
)
from flashdsa.kernels.attention.sm90.core.tile import (
    LEFT_PIECES,
    RIGHT_PIECES,
    ROWS,
    TILE_BYTES,
)

SCORES_DONE, P_FREE = 1, 2
"""Named barriers; 0 is the CTA's."""


@cute.jit
def arrive_warp(ctx: Any, name: cutlass.Constexpr, stage: cutlass.Constexpr = 0) -> None:
    """Arrive once for the warp: whoever waits sees what its lanes did before."""
    cute.arch.sync_warp()
    if ctx.thread % WARP_SIZE == 0:
        ctx.barriers(name).arrive(stage)


@cute.jit
def issue_scores(
    ctx: Any, s: cute.Tensor, step: Int32, there: Any, pieces: cutlass.Constexpr
) -> None:
    """Issue pieces of S of tile 0 as one group; the decode's too.

    A step without `there` gives numbers that nobody uses: a branch around wgmmas would make ptxas
    wait for each of them.
    """
    q, k = along_k(ctx.arena.address("q")), along_k(ctx.arena.address("k"))
    if there:
        for piece in pieces:
            # k0_full: the piece has been copied by threads; the fence shows it to wgmma.
            ctx.barriers("k0_full").wait(ctx.phase(step), piece)
    cute.arch.fence_proxy("async.shared", space="cta")
    for piece in pieces:
        multiply_scores(s, q, k, piece, piece == 0, ctx.kind_of_piece(piece))
    warpgroup.commit_group()


@cute.jit
def compute_scores(ctx: Any, s: cute.Tensor, step: Int32) -> None:
    """Compute S of tile 1: its right half first, which was freed first. The decode's too."""
    q, k = along_k(ctx.arena.address("q")), along_k(ctx.arena.address("k") + TILE_BYTES)
    for pieces in (RIGHT_PIECES, LEFT_PIECES):
        for piece in pieces:
            # k1_full: the piece has been copied by threads; the fence shows it to wgmma.
            ctx.barriers("k1_full").wait(ctx.phase(step), piece)
        cute.arch.fence_proxy("async.shared", space="cta")
        for piece in pieces:
            kind = ctx.kind_of_piece(piece)
            multiply_scores(s, q, k, piece, piece == RIGHT_PIECES[0], kind)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


SUMS = ("left_sums", "right_sums")
"""The barriers of the sides' sums."""


@cute.jit
def merge_sums(
    ctx: Any, rows: Rows, scale: Scale, items: Int32, side: cutlass.Constexpr
) -> list[Float32]:
    """The rows' sums over both consumers' tiles, against O's maxima."""
    own_sums, other_sums = SUMS[side], SUMS[1 - side]
    shared = ctx.arena.array("row_sum", Float32, 2 * 2 * ROWS)
    row = row_of_thread(ctx.thread)
    own = [quad_reduce(rows.row_sum[h], lambda a, b: a + b) for h in range(THREAD_ROWS)]
    # The other consumer read the previous item's sums before its P of this item, and this one has
    # waited for that P.
    if ctx.thread % 4 == 0:
        for h in cutlass.range_constexpr(THREAD_ROWS):
            shared[(side * 2) * ROWS + row + 8 * h] = own[h]
            shared[(side * 2 + 1) * ROWS + row + 8 * h] = rows.row_max[h]
            if cutlass.const_expr(side == 1 and rows.largest is not None):
                ctx.arena.array("largest", Float32, ROWS)[row + 8 * h] = rows.largest[h]
    ctx.barriers(own_sums).arrive()
    ctx.barriers(other_sums).wait_for(items)
    sums = []
    for h in cutlass.range_constexpr(THREAD_ROWS):
        others = shared[(1 - side) * 2 * ROWS + row + 8 * h]
        others_max = shared[((1 - side) * 2 + 1) * ROWS + row + 8 * h]
        sums.append(
            own[h] * exp2((rows.row_max[h] - rows.out_max[h]) * scale.factor)
            + others * exp2((others_max - rows.out_max[h]) * scale.factor)
        )
    return sums
