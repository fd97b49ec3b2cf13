"""The backward's matrix products: which MMAs, on which descriptors and TMEM columns.

Offsets in descriptors are from the base of shared memory, and of stage 0 of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashdsa.dsl.umma import SharedOperand, SharedTile, TilePart, TmemOperand, UmmaProduct
from flashdsa.kernels.attention.sm100.bwd.plan import BwdPlan
from flashdsa.kernels.attention.sm100.core.tile import PAIR_ROWS


@dataclass(frozen=True)
class Products:
    """Every product of a block, for one CTA. `p`: over the value dims. `p_rope`: the rest of P,
    with A at the RoPE dims of CTA 0. `dp`, `dq`, `dq_rope`: A in TMEM. `dkv`: for each part the
    products that add up to it: of S and dO, of dS and Q."""

    p: UmmaProduct
    p_rope: UmmaProduct
    dp: UmmaProduct
    dq: UmmaProduct
    dq_rope: UmmaProduct
    dkv: tuple[tuple[UmmaProduct, ...], ...]


def products_of(plan: BwdPlan) -> Products:
    """The products on the plan's regions."""
    smem, tmem, tile = plan.smem, plan.tmem, plan.tile
    q = SharedTile("q", smem.offset("q"), PAIR_ROWS, tile.dims, 128)
    q_rope = SharedTile("q_rope", smem.offset("q_rope"), PAIR_ROWS, tile.rope_dims, 128)
    do = SharedTile("do", smem.offset("do"), PAIR_ROWS, tile.dims, 128)
    kv = SharedTile("kv", smem.offset("kv"), tile.keys, tile.dims, 128)
    rope_at = smem.offset("kv") + tile.value_bytes
    kv_rope = SharedTile("kv_rope", rope_at, tile.keys, tile.own_rope_dims, 64)
    s = SharedTile("s", smem.offset("s"), PAIR_ROWS, tile.keys, 64)
    ds = SharedTile("ds", smem.offset("ds"), PAIR_ROWS, tile.keys, 64)

    def k_major(operand: SharedTile, rows: int, depth: int) -> SharedOperand:
        return SharedOperand("K", rows, (TilePart(operand, depth),))

    def mn_major(operand: SharedTile, extent: int, depth: int, first: int = 0) -> SharedOperand:
        return SharedOperand("MN", extent, (TilePart(operand, depth, column=first),))

    def part(operand: SharedTile, scores: SharedTile, m: int, first: int) -> UmmaProduct:
        a, b = mn_major(operand, m, PAIR_ROWS, first), mn_major(scores, tile.keys, PAIR_ROWS)
        return UmmaProduct(m, tile.keys, a, b, column=tmem.column("dkv"))

    def into(name: str, columns: int, a: Any, b: Any) -> UmmaProduct:
        return UmmaProduct(PAIR_ROWS, columns, a, b, column=tmem.column(name))

    keys, rope = tile.keys, tile.own_rope_dims
    of_rope = k_major(q_rope, PAIR_ROWS, rope), k_major(kv_rope, keys, rope)
    kv_rows, scores = k_major(kv, keys, tile.dims), TmemOperand(tmem.column("ds"), keys)
    return Products(
        p=into("p", keys, k_major(q, PAIR_ROWS, tile.dims), kv_rows),
        p_rope=into("p", keys, *of_rope),
        dp=into("dp", keys, TmemOperand(tmem.column("do"), tile.dims), kv_rows),
        dq=into("dq", tile.dims, scores, mn_major(kv, tile.dims, keys)),
        dq_rope=into("dq_rope", rope, scores, mn_major(kv_rope, rope, keys)),
        dkv=(
            (part(do, s, plan.part_dims, 0), part(q, ds, plan.part_dims, 0)),
            (
                part(do, s, plan.part_dims, plan.part_dims),
                part(q, ds, plan.part_dims, plan.part_dims),
            ),
            (part(q_rope, ds, tile.rope_dims, 0),),
        ),
    )
