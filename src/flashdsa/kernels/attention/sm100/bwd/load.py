"""Role load: row numbers, and the gather of each block's rows."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.gather4 import gather4
from flashdsa.dsl.pipeline import RingProducer
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm100.bwd.context import Context
from flashdsa.kernels.attention.sm100.bwd.plan import B_TOPK, BOX_DIMS, D_V

ROWS_A_GATHER = 4
QUADS = B_TOPK // ROWS_A_GATHER // (WARPGROUP_SIZE // WARP_SIZE)
"""Groups of four rows that a warp gathers of a block."""


class Loader(NamedTuple):
    """Fills kv, rows and masks. Signals kv_full and rows_full."""

    ctx: Context
    kv_map: Any  # (S_kv, 576), boxes of 1 x 64
    kv_rope_map: Any  # the same, boxes of 1 x 32
    indices: Any  # (items, any) int32
    members: Any  # of a group (items, any) uint8: bit i: query i of the group names the row
    num_rows: Int32  # S_kv

    @property
    def rows(self) -> RingProducer:
        """Row numbers: the use of the ring is the block's running number."""
        return self.ctx.arena.producer("rows_full", "rows_free")

    @property
    def keys(self) -> RingProducer:
        """The key blocks, likewise."""
        return self.ctx.arena.producer("kv_full", "kv_free")


@cute.jit
def store_masks(role: Loader, stage: Int32, slot: Int32, row: Int32) -> None:
    """One warp, lane = key: store which keys of a block each query of the group has."""
    ctx, plan = role.ctx, role.ctx.plan
    members = Int32(0)
    if row >= 0:
        place = Int64(ctx.item) * role.members.shape[1] + slot
        members = Int32((role.members.iterator + place).load())
    own = Int32(0)
    for query in cutlass.range(plan.group, unroll=1):
        mask = Int32(cute.arch.vote_ballot_sync((members >> query) & 1 == 1))
        if ctx.thread == query:
            own = mask
    if ctx.thread < plan.group:
        masks = ctx.arena.pointer("masks", Int32) + stage * plan.mask_words
        (masks + ctx.thread).store(own)


@cute.jit
def load_blocks(role: Loader) -> None:
    """Every warp, lane = key: load every block of the item."""
    ctx = role.ctx
    for block in cutlass.range(ctx.num_blocks, unroll=1):
        load_block(role, block)


@cute.jit
def load_block(role: Loader, block: Int32) -> None:
    """Publish the rows that a block names, by the first warp for the other roles; then copy the
    rows, a quarter of them a warp: only one lane of a warp issues at a time."""
    ctx, plan = role.ctx, role.ctx.plan
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    number = ctx.number(block)
    slot = block * B_TOPK + lane
    row = Int32(-1)
    if slot < ctx.num_slots:
        row = (role.indices.iterator + Int64(ctx.item) * role.indices.shape[1] + slot).load()
    if row >= role.num_rows:
        row = Int32(-1)
    if row < 0:
        row = Int32(-1)
    if warp == 0:
        to = role.rows.state(number)
        # rows_free, of the block before in this stage: softmax and reduce have read its numbers, so
        # these may overwrite them.
        role.rows.acquire(to)
        rows = ctx.arena.pointer("rows", Int32)
        (rows + to.stage * B_TOPK + lane).store(row)
        if cutlass.const_expr(plan.group > 1):
            store_masks(role, to.stage, slot, row)
        # rows_full: every lane arrives after its own stores.
        role.rows.commit(to.stage)

    to = role.keys.state(number)
    # kv_free, of the block before in this stage: dQ, the last MMA that reads it, is done. The phase
    # of kv_full ends only after the first warp's arrival, whichever warp's rows come first.
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
