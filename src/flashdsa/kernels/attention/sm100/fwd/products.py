"""The forward's matrix products: which MMAs, on which descriptors and TMEM columns.

Every MMA is of the pair (.cta_group::2, M = 128): a CTA has 64 of its rows, and half of N. Columns
of the first half of N come into lanes 0 to 63 of either CTA, those of the second half into lanes 64
to 127, and each half of the lanes is multiplied by the A that lies in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.dsl.umma import SharedOperand, SharedTile, TilePart, TmemOperand, UmmaProduct
from flashdsa.kernels.attention.sm100.core.tile import BOX_DIMS, CLUSTER, PAIR_ROWS
from flashdsa.kernels.attention.sm100.fwd.plan import ROWS, FwdPlan


@dataclass(frozen=True)
class Products:
    """Every product of a tile; offsets in descriptors are from the base of shared memory. `qk`,
    `qk_rope`: the two halves of N are the same 64 keys, over the dims of either CTA: A's lanes 0 to
    63 hold Q's dims of the first CTA, lanes 64 to 127 those of the second. `pv`: the first and the
    second half of each CTA's value dims."""

    qk: UmmaProduct
    qk_rope: UmmaProduct
    pv: tuple[UmmaProduct, ...]


def products_of(plan: FwdPlan) -> Products:
    """The products on the plan's regions, for stage 0 of the keys and of P."""
    smem, tmem, tile = plan.smem, plan.tmem, plan.tile
    # Value dims of a CTA in one product of P V, whose N has those of both CTAs.
    half_dims = tile.dims // 2
    kv = SharedTile("kv", smem.offset("kv"), tile.keys, tile.dims, 128)
    rope_at = smem.offset("kv") + tile.value_bytes
    kv_rope = SharedTile("kv_rope", rope_at, tile.keys, tile.own_rope_dims, 64)
    p = SharedTile("p", smem.offset("p"), ROWS, BOX_DIMS, 128)

    def scores(q: str, keys: SharedTile, dims: int) -> UmmaProduct:
        return UmmaProduct(
            PAIR_ROWS,
            CLUSTER * tile.keys,
            TmemOperand(tmem.column(q), dims, distinct=True),
            SharedOperand("K", tile.keys, (TilePart(keys, dims),)),
            column=tmem.column("s"),
            cta_group=CLUSTER,
        )

    def values(first: int) -> UmmaProduct:
        return UmmaProduct(
            PAIR_ROWS,
            CLUSTER * half_dims,
            SharedOperand("K", ROWS, (TilePart(p, tile.keys),)),
            SharedOperand("MN", half_dims, (TilePart(kv, tile.keys, column=first),)),
            column=tmem.column("o") + first,
            cta_group=CLUSTER,
        )

    return Products(
        scores("q", kv, tile.dims),
        scores("q_rope", kv_rope, tile.own_rope_dims),
        (values(0), values(half_dims)),
    )
