"""The backward's matrix products: which MMAs, on which descriptors and TMEM columns.

Offsets in descriptors are from the base of shared memory, and of stage 0 of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.dsl.umma import (
    SharedOperand,
    SharedTile,
    TilePart,
    TmemOperand,
    UmmaProduct,
)
from flashdsa.kernels.attention.sm100.bwd.plan import B_H, B_TOPK, BwdPlan


@dataclass(frozen=True)
class Products:
    """Every product of a block, for one CTA.

    Attributes:
        p: over the value dims. p_rope: the rest of P, with A at the RoPE dims of CTA 0.
        dp, dq, dq_rope: A in TMEM.
        dkv: for each part the products that add up to it: of S and dO, of dS and Q.
    """

    p: UmmaProduct
    p_rope: UmmaProduct
    dp: UmmaProduct
    dq: UmmaProduct
    dq_rope: UmmaProduct
    dkv: tuple[tuple[UmmaProduct, ...], ...]


def products_of(plan: BwdPlan) -> Products:
    """The products on the plan's regions."""
    smem, tmem = plan.smem, plan.tmem
    q = SharedTile("q", smem.offset("q"), B_H, plan.dims, 128)
    q_rope = SharedTile("q_rope", smem.offset("q_rope"), B_H, plan.rope_dims, 128)
    do = SharedTile("do", smem.offset("do"), B_H, plan.dims, 128)
    kv = SharedTile("kv", smem.offset("kv"), B_TOPK, plan.dims, 128)
    rope_at = smem.offset("kv") + plan.kv_value_bytes
    kv_rope = SharedTile("kv_rope", rope_at, B_TOPK, plan.own_rope_dims, 64)
    s = SharedTile("s", smem.offset("s"), B_H, B_TOPK, 64)
    ds = SharedTile("ds", smem.offset("ds"), B_H, B_TOPK, 64)

    def k_major(tile: SharedTile, rows: int, depth: int) -> SharedOperand:
        return SharedOperand("K", rows, (TilePart(tile, depth),))

    def mn_major(tile: SharedTile, extent: int, depth: int, first: int = 0) -> SharedOperand:
        return SharedOperand("MN", extent, (TilePart(tile, depth, column=first),))

    def part(tile: SharedTile, scores: SharedTile, m: int, first: int) -> UmmaProduct:
        a, b = mn_major(tile, m, B_H, first), mn_major(scores, B_TOPK, B_H)
        return UmmaProduct(m, B_TOPK, a, b, column=tmem.column("dkv"))

    return Products(
        p=UmmaProduct(
            B_H,
            B_TOPK,
            k_major(q, B_H, plan.dims),
            k_major(kv, B_TOPK, plan.dims),
            column=tmem.column("p"),
        ),
        p_rope=UmmaProduct(
            B_H,
            B_TOPK,
            k_major(q_rope, B_H, plan.own_rope_dims),
            k_major(kv_rope, B_TOPK, plan.own_rope_dims),
            column=tmem.column("p"),
        ),
        dp=UmmaProduct(
            B_H,
            B_TOPK,
            TmemOperand(tmem.column("do"), plan.dims),
            k_major(kv, B_TOPK, plan.dims),
            column=tmem.column("dp"),
        ),
        dq=UmmaProduct(
            B_H,
            plan.dims,
            TmemOperand(tmem.column("ds"), B_TOPK),
            mn_major(kv, plan.dims, B_TOPK),
            column=tmem.column("dq"),
        ),
        dq_rope=UmmaProduct(
            B_H,
            plan.own_rope_dims,
            TmemOperand(tmem.column("ds"), B_TOPK),
            mn_major(kv_rope, plan.own_rope_dims, B_TOPK),
            column=tmem.column("dq_rope"),
        ),
        dkv=(
            (part(do, s, plan.part_dims, 0), part(q, ds, plan.part_dims, 0)),
            (
                part(do, s, plan.part_dims, plan.part_dims),
                part(q, ds, plan.part_dims, plan.part_dims),
            ),
            (part(q_rope, ds, plan.rope_dims, 0),),
        ),
    )
