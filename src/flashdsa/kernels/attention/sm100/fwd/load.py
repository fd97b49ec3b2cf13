"""Context of every role, and role load: Q once, the masks of each tile of keys, and its rows."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.gather4 import gather4
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.pipeline import PipelineState, Ring, RingProducer
from flashdsa.dsl.tma import load_box
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm100.core.slots import read_row
from flashdsa.kernels.attention.sm100.core.tile import BF16, BOX_DIMS, PAIR_ROWS
from flashdsa.kernels.attention.sm100.fwd.plan import BOX_BYTES, ROWS, FwdPlan

LEADER = 0
"""Rank of the CTA that issues the MMAs."""


class Context(NamedTuple):
    """One CTA's position in the launch."""

    memory: Memory
    tmem: Int32  # TMEM address of the allocation
    cta_rank: Int32  # in the pair: selects the rows of Q and O, and the half of the keys' dims
    item: Int32  # the pair's 128 rows of Q: a query's, or a group's
    num_slots: Int32  # slots of the item that may be valid
    num_tiles: Int32  # of tile.keys keys, at least 1
    thread: Int32  # in its warpgroup, which is also its TMEM lane

    @property
    def plan(self) -> FwdPlan:
        return self.memory.plan

    def keys_at(self, tile: Any) -> PipelineState:
        """State of a tile of keys in its ring. The first tiles leave out the stages that hold Q,
        which are the last of each round."""
        return Ring(self.plan.kv_stages, first=self.plan.q_stages).state(tile)


ROWS_A_GATHER = 4


class Loader(NamedTuple):
    """Fills q, kv and masks. Signals q_full, kv_full, masks_full."""

    ctx: Context
    q_map: Any  # (S * H, 576), boxes of 64 x 64
    kv_map: Any  # (S_kv, 576), boxes of 1 x 64
    kv_rope_map: Any  # the same, or (S_kv, 64), boxes of 1 x 32
    slots: Any  # (items, any) int32: rows of kv; negative or too large: not valid
    members: Any  # of a group (items, any) uint8: bit i: query i of the group names the row
    num_rows: Int32  # S_kv

    @property
    def keys(self) -> RingProducer:
        """Tiles of keys, in the states of `Context.keys_at`."""
        return RingProducer(self.ctx.memory.kv_full, self.ctx.memory.kv_free)

    @property
    def masks(self) -> RingProducer:
        """Valid keys: use i of the ring is tile i."""
        return RingProducer(self.ctx.memory.masks_full, self.ctx.memory.masks_free)


@cute.jit
def load_query(role: Loader) -> None:
    """One thread: load the CTA's rows of Q, all dims; rows past the last one become zeros."""
    ctx = role.ctx
    barrier = ctx.memory.q_full
    barrier.arrive_and_expect_tx()
    first_row = ctx.item * PAIR_ROWS + ctx.cta_rank * ROWS
    for box in cutlass.range_constexpr(ctx.plan.q_boxes):
        at = ctx.memory.kv.bytes() + box * BOX_BYTES
        load_box(at, role.q_map, [Int32(box * BOX_DIMS), first_row], barrier.at())


@cute.jit
def row_of(role: Loader, slot: Int32) -> Int32:
    """The row of kv that a slot of the item names; -1 where it is not valid."""
    ctx = role.ctx
    return read_row(role.slots, ctx.item, slot, ctx.num_slots, role.num_rows)


@cute.jit
def members_of(role: Loader, slot: Int32, row: Int32) -> Int32:
    """Queries of the item that name a slot's row, a bit each."""
    ctx = role.ctx
    members = Int32(0)
    if row >= 0:
        members = Int32(1)
        if cutlass.const_expr(role.members is not None):
            place = Int64(ctx.item) * role.members.shape[1] + slot
            members = Int32((role.members.iterator + place).load())
    return members


@cute.jit
def write_masks(role: Loader, tile: Int32) -> None:
    """One warp: write which keys of the tile each query has."""
    ctx, group, keys = role.ctx, role.ctx.plan.group, role.ctx.plan.tile
    lane = ctx.thread % WARP_SIZE
    found = []
    for word in cutlass.range_constexpr(keys.mask_words):
        slot = tile * keys.keys + word * WARP_SIZE + lane
        found.append(members_of(role, slot, row_of(role, slot)))
    to = role.masks.state(tile)
    # masks_free, of the tile before in this stage: every warp of softmax has read its words.
    role.masks.acquire(to)
    masks = ctx.memory.masks.pointer(Int32) + to.stage * (group * keys.mask_words)
    for query in cutlass.range_constexpr(group):
        for word in cutlass.range_constexpr(keys.mask_words):
            mask = Int32(cute.arch.vote_ballot_sync((found[word] >> query) & 1 == 1))
            if lane == 0:
                (masks + (query * keys.mask_words + word)).store(mask)
    if lane == 0:
        # masks_full: this lane has written all words.
        role.masks.commit(to.stage)
    cute.arch.sync_warp()


@cute.jit
def gather_tile(role: Loader, tile: Int32, row: Int32) -> None:
    """Load a warp's keys of a tile: the CTA's half of their dims. `row`: of kv, of the warp's key
    that has the lane's number."""
    ctx, plan, keys = role.ctx, role.ctx.plan, role.ctx.plan.tile
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    to = ctx.keys_at(tile)
    if tile == plan.kv_stages - plan.q_stages:
        # q_read, its only time: every warp of softmax has read Q, whose bytes this tile and later
        # ones overwrite.
        ctx.memory.q_read.wait_round(0)
    # kv_free, of the tile before in this stage: P V, the last product that reads it, is done in
    # both CTAs. So kv_full's phase is this tile's, whichever CTA's rows come first: it ends only
    # after the first CTA's arrival.
    role.keys.acquire(to)
    full = role.keys.full.at(to.stage)
    if ctx.thread == 0 and ctx.cta_rank == LEADER:
        role.keys.expect(to.stage)
    cute.arch.sync_warp()
    four = [cute.arch.shuffle_sync(row, (lane * ROWS_A_GATHER + i) % WARP_SIZE) for i in range(4)]
    if lane < plan.warp_keys // ROWS_A_GATHER:
        start = ctx.memory.kv.address() + to.stage * keys.bytes
        first_key = warp * plan.warp_keys + lane * ROWS_A_GATHER
        for box in cutlass.range_constexpr(keys.boxes):
            gather4(
                start + box * keys.box_bytes + first_key * (BOX_DIMS * BF16),
                role.kv_map,
                ctx.cta_rank * keys.dims + box * BOX_DIMS,
                four,
                full,
                of_pair=True,
            )
        gather4(
            start + keys.value_bytes + first_key * (keys.own_rope_dims * BF16),
            role.kv_rope_map,
            plan.rope_column + ctx.cta_rank * keys.own_rope_dims,
            four,
            full,
            of_pair=True,
        )
    cute.arch.sync_warp()


@cute.jit
def load_all(role: Loader) -> None:
    """Every warp: load every tile of the item. Row numbers are read a tile in advance."""
    ctx, plan = role.ctx, role.ctx.plan
    warp, lane = ctx.thread // WARP_SIZE, ctx.thread % WARP_SIZE
    slot = warp * plan.warp_keys + lane % plan.warp_keys
    row = row_of(role, slot)
    for tile in cutlass.range(ctx.num_tiles, unroll=1):
        ahead = row_of(role, (tile + 1) * plan.tile.keys + slot)
        gather_tile(role, tile, row)
        if warp == 0:
            write_masks(role, tile)
        row = ahead
