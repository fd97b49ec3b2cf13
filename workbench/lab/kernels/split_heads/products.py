"""The matrix products of the backward with split heads: descriptors and TMEM columns.

All are .cta_group::1. P and dP leave M = 64 heads in 16 of every warp's 32 lanes. The others are
.ws with A in tensor memory: with M = 64 each half of the lanes computes half of N with the A that
lies in it, with M = 32 each warp's lanes a quarter. So dS lies there twice, S^T and dS^T four
times.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.dsl.umma import SharedOperand, SharedTile, TilePart, TmemOperand, UmmaProduct
from workbench.lab.kernels.split_heads.plan import HEADS, HeadsPlan


@dataclass(frozen=True)
class Products:
    """Every product of a block; offsets in descriptors are from the base of shared memory.

    Attributes:
        dq: 128, 128 and 32 columns of tensor memory, each of both halves of the lanes.
        dkv: for each part the products that add up to it: of S and dO, of dS and Q.
    """

    p: UmmaProduct
    dp: UmmaProduct
    dq: tuple[UmmaProduct, ...]
    dkv: tuple[tuple[UmmaProduct, ...], ...]


def products_of(plan: HeadsPlan) -> Products:
    """The products on the plan's regions."""
    smem, tmem, tile, dims = plan.smem, plan.tmem, plan.tile, plan.part_dims
    q = SharedTile("q", smem.offset("q"), HEADS, tile.d_qk, 128)
    do = SharedTile("do", smem.offset("do"), HEADS, tile.d_v, 128)
    kv = SharedTile("kv", smem.offset("kv"), tile.keys, tile.d_qk, 128)

    def scores(left: SharedTile, d: str) -> UmmaProduct:
        a = SharedOperand("K", HEADS, (TilePart(left, left.columns),))
        b = SharedOperand("K", tile.keys, (TilePart(kv, left.columns),))
        return UmmaProduct(HEADS, tile.keys, a, b, column=tmem.column(d))

    def from_tmem(a: str, m: int, b: SharedTile, first: int, n: int, d: int) -> UmmaProduct:
        left = TmemOperand(tmem.column(a), b.rows)
        right = SharedOperand("MN", n, (TilePart(b, b.rows, column=first),))
        return UmmaProduct(m, n, left, right, column=d, ws=True)

    def dq(first: int, n: int) -> UmmaProduct:
        return from_tmem("ds_rows", HEADS, kv, first, n, tmem.column("dq") + first // 2)

    def part(first: int, n: int, d: str, *scores: str) -> tuple[UmmaProduct, ...]:
        right = {"s": do, "ds": q}
        column = tmem.column(d)
        return tuple(from_tmem(a, tile.keys, right[a], first, n, column) for a in scores)

    return Products(
        p=scores(q, "p"),
        dp=scores(do, "dp"),
        dq=(dq(0, dims), dq(dims, dims), dq(tile.d_v, tile.rope_dims)),
        dkv=(
            part(0, dims, "dkv", "s", "ds"),
            part(dims, dims, "dkv", "s", "ds"),
            part(tile.d_v, tile.rope_dims, "dkv_rope", "ds"),
        ),
    )
