"""Context of every role, and role load: row numbers, and the gather of each block's rows.

A pair of CTAs takes one item after the other, each a query or a group of them. Items and blocks
have running numbers over all items, which give the phases of barriers.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl import tmem
from flashdsa.dsl.gather4 import gather4
from flashdsa.dsl.grids import place_in_grid
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.pipeline import RingProducer
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm100.core.slots import read_row
from flashdsa.kernels.attention.sm100.core.tile import BF16, BOX_DIMS, CLUSTER


class Turn(NamedTuple):
    """An item that a pair takes, and what it took before."""

    item: Int32  # the query, or the group of them
    items_before: Int32
    blocks_before: Int32  # of those items


class Context(NamedTuple):
    """One CTA's position in the launch, and its item."""

    memory: Memory
    tmem: Int32  # TMEM address of the allocation
    cta_rank: Int32  # in the cluster: which half of the dims
    turn: Turn
    num_slots: Int32  # of the item that may be valid
    num_blocks: Int32  # of tile.keys keys, at least 1
    thread: Int32  # in its warpgroup, which is also its TMEM lane

    @property
    def plan(self) -> Any:
        return self.memory.plan

    @property
    def item(self) -> Int32:
        """The query, or the group of them."""
        return self.turn.item

    def number(self, block: Any) -> Any:
        """The running number of a block of the item: its use number in rings and barriers."""
        return self.turn.blocks_before + block


def first_turn() -> Turn:
    """The first turn of a pair: the item with the pair's number."""
    block, _, _ = cute.arch.block_idx()
    return Turn(Int32(block // CLUSTER), Int32(0), Int32(0))


def next_turn(ctx: Context) -> Turn:
    """The turn after the item of `ctx`: the item's number grows by the number of pairs."""
    ctas, _, _ = cute.arch.grid_dim()
    turn = ctx.turn
    return Turn(
        turn.item + ctas // CLUSTER, turn.items_before + 1, turn.blocks_before + ctx.num_blocks
    )


@cute.jit
def locate(topk_length: cute.Tensor, indices: cute.Tensor, memory: Memory, turn: Turn) -> Context:
    """This thread's context for an item."""
    thread, block, _ = place_in_grid()
    keys = memory.plan.tile.keys
    num_slots = cutlass.min(topk_length[turn.item], Int32(indices.shape[1]))
    return Context(
        memory=memory,
        tmem=memory.tmem_start.pointer(Int32).load(),
        cta_rank=block % CLUSTER,
        turn=turn,
        num_slots=num_slots,
        num_blocks=cutlass.max((num_slots + keys - 1) // keys, Int32(1)),
        thread=thread % WARPGROUP_SIZE,
    )


def load_lane(ctx: Context, name: str, columns: int, offset: int = 0) -> Any:
    """This thread's lane of a TMEM region, a Vector of fp32; waits for it."""
    return tmem.load_lane(ctx.tmem, ctx.plan.tmem.column(name) + offset, ctx.thread, columns)


def store_lane(ctx: Context, name: str, words: Any, offset: int = 0) -> None:
    """Store a Vector of words to this thread's lane of a TMEM region; `tmem.wait_stored` waits."""
    tmem.store_lane(ctx.tmem, ctx.plan.tmem.column(name) + offset, ctx.thread, words)


ROWS_A_GATHER = 4


class Loader(NamedTuple):
    """Fills kv, rows and masks. Signals kv_full and rows_full."""

    ctx: Context
    kv_map: Any  # (S_kv, 576), boxes of 1 x 64
    kv_rope_map: Any  # the same, boxes of 1 x 32; None where kv_map reads all dims
    indices: Any  # (items, any) int32
    members: Any  # of a group (items, any) uint8: bit i: query i of the group names the row
    num_rows: Int32  # S_kv

    @property
    def rows(self) -> RingProducer:
        """Row numbers: the use of the ring is the block's running number."""
        return RingProducer(self.ctx.memory.rows_full, self.ctx.memory.rows_free)

    @property
    def keys(self) -> RingProducer:
        return RingProducer(self.ctx.memory.kv_full, self.ctx.memory.kv_free)


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
        masks = ctx.memory.masks.pointer(Int32) + stage * plan.mask_words
        (masks + ctx.thread).store(own)


@cute.jit
def load_blocks(role: Loader) -> None:
    """Every warp, lane = key: load every block of the item."""
    ctx = role.ctx
    for block in cutlass.range(ctx.num_blocks, unroll=1):
        load_block(role, block)


@cute.jit
def publish_row(role: Loader, block: Int32) -> Int32:
    """Every warp, lane = key: return the key's row; the first warp stores all for other roles."""
    ctx, keys = role.ctx, role.ctx.plan.tile.keys
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    number = ctx.number(block)
    slot = block * keys + lane
    row = read_row(role.indices, ctx.item, slot, ctx.num_slots, role.num_rows)
    if warp == 0:
        to = role.rows.state(number)
        # rows_free, of the block before in this stage: softmax and reduce have read its numbers, so
        # these may overwrite them.
        role.rows.acquire(to)
        rows = ctx.memory.rows.pointer(Int32)
        (rows + to.stage * keys + lane).store(row)
        if cutlass.const_expr(ctx.plan.group > 1):
            store_masks(role, to.stage, slot, row)
        # rows_full: every lane arrives after its own stores.
        role.rows.commit(to.stage)
    return row


@cute.jit
def load_block(role: Loader, block: Int32) -> None:
    """Publish the rows that a block names, by the first warp for the other roles; then copy the
    rows, a quarter of them a warp: only one lane of a warp issues at a time."""
    ctx, tile = role.ctx, role.ctx.plan.tile
    quads = tile.keys // ROWS_A_GATHER // (WARPGROUP_SIZE // WARP_SIZE)
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    number = ctx.number(block)
    row = publish_row(role, block)

    to = role.keys.state(number)
    # kv_free, of the block before in this stage: dQ, the last MMA that reads it, is done. The phase
    # of kv_full ends only after the first warp's arrival, whichever warp's rows come first.
    role.keys.acquire(to)
    full = role.keys.full.at(to.stage)
    if ctx.thread == 0:
        role.keys.expect(to.stage)
    cute.arch.sync_warp()
    quad = warp * quads + lane
    four = [cute.arch.shuffle_sync(row, (quad * ROWS_A_GATHER + i) % WARP_SIZE) for i in range(4)]
    if lane < quads:
        start = ctx.memory.kv.address() + to.stage * tile.bytes
        at = start + quad * (ROWS_A_GATHER * BOX_DIMS * BF16)
        for box in cutlass.range_constexpr(tile.boxes):
            gather4(
                at + box * tile.box_bytes,
                role.kv_map,
                ctx.cta_rank * tile.dims + box * BOX_DIMS,
                four,
                full,
            )
        gather4(
            start + tile.value_bytes + quad * (ROWS_A_GATHER * tile.own_rope_dims * BF16),
            role.kv_rope_map,
            tile.d_v + ctx.cta_rank * tile.own_rope_dims,
            four,
            full,
        )
    cute.arch.sync_warp()
