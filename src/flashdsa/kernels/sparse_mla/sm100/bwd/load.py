"""Role load: row numbers, the gather of each block's rows, and Q and dO once."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.gather4 import gather4
from flashdsa.dsl.pipeline import RingProducer
from flashdsa.dsl.tma import load_box
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.sparse_mla.sm100.bwd.context import Context
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import B_H, B_TOPK, BOX_DIMS, D_V

ROWS_A_GATHER = 4
QUADS = B_TOPK // ROWS_A_GATHER // (WARPGROUP_SIZE // WARP_SIZE)
"""Groups of four rows that a warp gathers of a block."""


class Loader(NamedTuple):
    """Fills q, do, kv and rows. Signals q_full, do_full, kv_full, rows_full."""

    ctx: Context
    q_map: Any  # (S * H, 576), boxes of H x 64
    do_map: Any  # (S * H, 512), likewise
    kv_map: Any  # (S_kv, 576), boxes of 1 x 64
    kv_rope_map: Any  # the same, boxes of 1 x 32
    indices: Any  # (items, any) int32
    members: Any  # of a group (items, any) uint8: bit i: query i of the group names the row
    present: Any  # of a group (items,) int32: bit i: query i names any row
    num_slots: Int32  # slots of this item that may be valid
    num_rows: Int32  # S_kv

    @property
    def rows(self) -> RingProducer:
        """Row numbers: use b of the ring is block b."""
        return self.ctx.arena.producer("rows_full", "rows_free")

    @property
    def keys(self) -> RingProducer:
        """The key blocks, likewise."""
        return self.ctx.arena.producer("kv_full", "kv_free")


@cute.jit
def load_query(role: Loader) -> None:
    """One thread: Q's and dO's dims of this CTA, as boxes of 64 dims of a query."""
    ctx, plan = role.ctx, role.ctx.plan
    box_bytes = B_H * BOX_DIMS * 2
    for name, full, tensor_map in (("q", "q_full", role.q_map), ("do", "do_full", role.do_map)):
        barrier = ctx.barriers(full)
        barrier.arrive_and_expect_tx()
        at = ctx.arena.bytes(name)
        for box in cutlass.range_constexpr(plan.dims // BOX_DIMS):
            first_dim = ctx.cta_rank * plan.dims + box * BOX_DIMS
            load_rows(role, at + box * box_bytes, tensor_map, first_dim, barrier.at())
    load_rows(role, ctx.arena.bytes("q_rope"), role.q_map, Int32(D_V), ctx.barriers("q_full").at())


@cute.jit
def load_rows(role: Loader, at: Any, tensor_map: Any, first_dim: Int32, barrier: Any) -> None:
    """A box of the item's 128 rows, query by query.

    A query that names no row shares dKV's sums with others, and what its Q and dO hold, NaN too,
    times S = 0 would go there: it is read from a place outside of the tensor, which gives zeros. So
    are queries behind the last one.
    """
    ctx, plan = role.ctx, role.ctx.plan
    for query in cutlass.range_constexpr(plan.group):
        row = ctx.item * B_H + query * plan.group_heads
        if cutlass.const_expr(plan.group > 1):
            if (role.present[ctx.item] >> query) & 1 == 0:
                row = Int32(-B_H)
        load_box(
            at + query * (plan.group_heads * BOX_DIMS * 2), tensor_map, [first_dim, row], barrier
        )


@cute.jit
def store_masks(role: Loader, stage: Int32, slot: Int32, row: Int32) -> None:
    """One warp, lane = key: which keys of a block each query of the group has."""
    ctx, plan = role.ctx, role.ctx.plan
    members = Int32(0)
    if row >= 0:
        place = Int64(ctx.item) * role.members.shape[1] + slot
        members = Int32((role.members.iterator + place).load())
    masks = ctx.arena.pointer("masks", Int32) + stage * plan.mask_words
    for query in cutlass.range_constexpr(plan.group):
        mask = Int32(cute.arch.vote_ballot_sync((members >> query) & 1 == 1))
        if ctx.thread == query:
            (masks + query).store(mask)


@cute.jit
def load_blocks(role: Loader) -> None:
    """Every warp, lane = key: every block of the query."""
    ctx = role.ctx
    for block in cutlass.range(ctx.num_blocks, unroll=1):
        load_block(role, block)


@cute.jit
def load_block(role: Loader, block: Int32) -> None:
    """Which rows a block names, by the first warp for the other roles; then the rows themselves, a
    quarter of them a warp: only one lane of a warp issues at a time."""
    ctx, plan = role.ctx, role.ctx.plan
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    slot = block * B_TOPK + lane
    row = Int32(-1)
    if slot < role.num_slots:
        row = (role.indices.iterator + Int64(ctx.item) * role.indices.shape[1] + slot).load()
    if row >= role.num_rows:
        row = Int32(-1)
    if row < 0:
        row = Int32(-1)
    if warp == 0:
        to = role.rows.state(block)
        # rows_free, of the block before in this stage: softmax and reduce have read its numbers, so
        # these may overwrite them.
        role.rows.acquire(to)
        rows = ctx.arena.pointer("rows", Int32)
        (rows + to.stage * B_TOPK + lane).store(row)
        if cutlass.const_expr(plan.group > 1):
            store_masks(role, to.stage, slot, row)
        # rows_full: every lane arrives behind its own stores.
        role.rows.commit(to.stage)

    to = role.keys.state(block)
    # kv_free, of the block before in this stage: dQ, the last MMA that reads it, is done. The phase
    # of kv_full ends only behind the first warp's arrival, whichever warp's rows come first.
    role.keys.acquire(to)
    full = role.keys.full.at(to.stage)
    if ctx.thread == 0:
        role.keys.expect(to.stage)
    cute.arch.sync_warp()
    quad = warp * QUADS + lane
    four = [cute.arch.shuffle_sync(row, (quad * ROWS_A_GATHER + i) % WARP_SIZE) for i in range(4)]
    if lane < QUADS:
        start = ctx.arena.address("kv") + to.stage * plan.kv_bytes
        at = start + quad * (ROWS_A_GATHER * BOX_DIMS * 2)
        for box in cutlass.range_constexpr(plan.dims // BOX_DIMS):
            gather4(
                at + box * (B_TOPK * BOX_DIMS * 2),
                role.kv_map,
                ctx.cta_rank * plan.dims + box * BOX_DIMS,
                four,
                full,
            )
        gather4(
            start + plan.kv_value_bytes + quad * (ROWS_A_GATHER * plan.own_rope_dims * 2),
            role.kv_rope_map,
            D_V + ctx.cta_rank * plan.own_rope_dims,
            four,
            full,
        )
    cute.arch.sync_warp()
