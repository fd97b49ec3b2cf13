"""Role mma: one thread issues every MMA of the CTA, a warp brings Q and dO.

Block b, in the order of issue:
    P, dP | dKV part 0 = S^T dO, + dS^T Q | dQ += dS K | dKV part 1 | dKV part 2
A CTA issues its own dQ: an MMA of .cta_group::1 writes tensor memory of its own CTA alone.

P and dP leave M = 64 heads in 16 of every warp's 32 lanes. The other products are .ws with A in
tensor memory: with M = 64 each half of the lanes computes half of N with the A that lies in it,
with M = 32 each warp's lanes a quarter. So dS lies there twice, S^T and dS^T four times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.memory import Region
from flashdsa.dsl.pipeline import Barriers
from flashdsa.dsl.tma import load_box
from flashdsa.dsl.tmem import wait_then_tcgen05
from flashdsa.dsl.umma import SharedOperand, SharedTile, TilePart, TmemOperand, UmmaProduct
from flashdsa.dsl.umma_issue import commit
from flashdsa.kernels.attention.sm100.bwd.load import Context
from flashdsa.kernels.attention.sm100.bwd.mma import Issuer, QueryLoader, issue_product
from flashdsa.kernels.attention.sm100.core.tile import BOX_DIMS, PAIR_ROWS
from workbench.lab.kernels.split_heads.plan import HEADS, PARTS, HeadsPlan


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


@cute.jit
def load_heads(role: QueryLoader) -> None:
    """One thread: load the own heads' rows of Q and dO."""
    memory, tile = role.ctx.memory, role.ctx.plan.tile
    load_dims(role.ctx, role.q_map, memory.q, memory.q_full, tile.d_qk)
    load_dims(role.ctx, role.do_map, memory.do, memory.do_full, tile.d_v)


@cute.jit
def load_dims(
    ctx: Context, tensor_map: Any, region: Region, full: Barriers, dims: cutlass.Constexpr[int]
) -> None:
    """Load the own heads' rows of Q or dO, a box of 64 dims at a time."""
    full.arrive_and_expect_tx()
    row = ctx.item * PAIR_ROWS + ctx.cta_rank * HEADS
    for box in cutlass.range_constexpr(dims // BOX_DIMS):
        to = region.bytes() + box * ctx.plan.head_box_bytes
        load_box(to, tensor_map, [Int32(box * BOX_DIMS), row], full.at())


@cute.jit
def wait_for_part(ctx: Context, block: Int32, part: cutlass.Constexpr[int]) -> None:
    """Wait until the part before has landed: sdkv, and the columns of dkv, may be written. dkv_done
    by the reduce role; it passes for the first part of all."""
    if cutlass.const_expr(part == 0):
        wait_then_tcgen05(ctx.memory.dkv_done, block - 1, PARTS - 1)
    else:
        wait_then_tcgen05(ctx.memory.dkv_done, block, part - 1)


@cute.jit
def issue_one(role: Issuer, block: Int32) -> None:
    """Issue every MMA of a block. P's and dP's columns were read before the block before's S and dS
    were ready."""
    ctx, memory, products = role.ctx, role.ctx.memory, role.static.value
    # kv_peer_ready of this block, by the load role's threads, of which one had waited for the own
    # gather: all keys are there, until kv_free.
    wait_then_tcgen05(memory.kv_peer_ready, block)
    issue_product(ctx, products.p, True, 0, 0)
    commit(memory.p_ready)
    issue_product(ctx, products.dp, True, 0, 0)
    commit(memory.dp_ready)
    # s_ready of this block: S^T is in TMEM, until p_ready of the next one.
    memory.s_ready.wait_round(block)
    wait_for_part(ctx, block, 0)
    issue_product(ctx, products.dkv[0][0], True, 0, 0)
    # ds_ready of this block: dS^T and dS are in TMEM, likewise.
    wait_then_tcgen05(memory.ds_ready, block)
    issue_product(ctx, products.dkv[0][1], False, 0, 0)
    commit(memory.dkv_ready, 0)
    for product in products.dq:
        issue_product(ctx, product, block == 0, 0, 0)
    commit(memory.kv_free)
    for part in cutlass.range_constexpr(1, PARTS):
        wait_for_part(ctx, block, part)
        for index, product in enumerate(products.dkv[part]):
            issue_product(ctx, product, index == 0, 0, 0)
        commit(memory.dkv_ready, part)
    if block + 1 == ctx.num_blocks:
        commit(memory.dq_ready)


@cute.jit
def issue_all(role: Issuer) -> None:
    """One thread: issue every block."""
    memory = role.ctx.memory
    # q_full, do_full: TMA has brought Q and dO, which stay until dq_ready.
    memory.q_full.wait_round(0)
    memory.do_full.wait_round(0)
    for block in cutlass.range(role.ctx.num_blocks, unroll=1):
        issue_one(role, block)
