"""Role right: Q and dO of each item, and the right dims of dQ."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.pipeline import arrive_warp
from flashdsa.dsl.wgmma import along_n
from flashdsa.kernels.attention.sm90.bwd_per_item.context import Context, tiles_of
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import LEFT_CHUNKS
from flashdsa.kernels.attention.sm90.bwd_per_item.rows import Rows, copy_rows
from flashdsa.kernels.attention.sm90.bwd_per_item.score import STEP_BYTES
from flashdsa.kernels.attention.sm90.bwd_per_item.store import store_dq
from flashdsa.kernels.attention.sm90.core.backward import multiply
from flashdsa.kernels.attention.sm90.core.tile import CHUNK, CHUNK_BYTES

PRODUCTS = ((4, 2), (6, 2), (8, 1))
"""First chunk of dims, and chunks: each is a group of wgmmas."""


class Right(NamedTuple):
    """Reads k and ds; writes rows, dQ. Signals rows_full, k_free_right, scores_free."""

    ctx: Context
    q: cute.Tensor  # (S * H, 576) bf16
    do: cute.Tensor  # (S * H, 512) bf16
    dq: cute.Tensor  # (S * H, 576) bf16


@cute.jit
def add_dq(role: Right, accs: Any) -> None:
    """Add dS K to dQ, dims 256-575; free the chunks, and P and dS."""
    ctx = role.ctx
    ds, keys = ctx.arena.address("ds"), ctx.arena.address("k")
    warpgroup.fence()
    for product, (first, chunks) in enumerate(PRODUCTS):
        multiply(
            accs[product],
            chunks * CHUNK,
            (along_n(ds), STEP_BYTES),
            (along_n(keys + first * CHUNK_BYTES), STEP_BYTES),
            transposed=True,
            clear=False,
        )
        warpgroup.commit_group()
    for product, (first, chunks) in enumerate(PRODUCTS):
        warpgroup.wait_group(len(PRODUCTS) - 1 - product)
        for chunk in cutlass.range_constexpr(chunks):
            arrive_warp(ctx.barriers("k_free_right"), first + chunk - LEFT_CHUNKS, ctx.thread)
    arrive_warp(ctx.barriers("scores_free"), 0, ctx.thread)


@cute.jit
def right_all(role: Right) -> None:
    """Take every tile of the CTA's items."""
    ctx = role.ctx
    accs = [cute.make_rmem_tensor(chunks * CHUNK // 2, Float32) for _, chunks in PRODUCTS]
    number, items = Int32(0), Int32(0)
    for item in cutlass.range(ctx.cta, ctx.num_items, ctx.num_ctas, unroll=1):
        tiles = tiles_of(ctx, item)
        if tiles.count > 0:
            # rows_free: S, dP and dKV of the item before have read its Q and dO.
            ctx.barriers("rows_free").wait_round(items - 1)
            copy_rows(Rows(ctx, role.q, role.do), item)
            items += 1
        for acc in accs:
            acc.fill(0.0)
        for _ in cutlass.range(tiles.count, unroll=1):
            ctx.barriers("scores_full").wait_round(number)
            # The keys have been copied by threads; the fence shows them to wgmma.
            cute.arch.fence_proxy("async.shared", space="cta")
            add_dq(role, accs)
            number += 1
        for product, (first, chunks) in enumerate(PRODUCTS):
            dims = chunks * CHUNK
            store_dq(role.dq, accs[product], item, ctx.thread, first * CHUNK, dims)
