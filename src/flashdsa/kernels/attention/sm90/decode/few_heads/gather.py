"""Role gather: whole rows by bulk copies, one a lane; a warp has a piece of 32 keys of each step.
Scales that lie apart follow a row's data.

Rows keep their format in shared memory: the consumers bring them into registers. The pieces are a
ring for each consumer, which the two warps of its tiles fill: piece n is in stage n % stages. A
consumer releases both pieces of a tile, so no warp is a round before the other one, whichever of
them had a stage before.
"""

from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.cp_async import arrive_when_copied, copy_word
from flashdsa.dsl.pipeline import PipelineState, Ring, RingProducer
from flashdsa.dsl.smem import store_words
from flashdsa.dsl.tma import load_bytes
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import CONSUMERS, FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.shared.gather import (
    Gatherer,
    ask_slot,
    find_extent,
    last_slots,
    pages_of,
    read_slot,
    row_address,
    row_of_slot,
    scales_address,
)

UNIT = 16
"""Bytes of a store."""


def tiles_of_consumer(num_tiles: Any, consumer: Any) -> Any:
    """Tiles of a consumer, of the CTA's `num_tiles`."""
    return (num_tiles + (CONSUMERS - 1) - consumer) // CONSUMERS


def state_of_piece(plan: FewHeadsPlan, consumer: Any, number: Any) -> PipelineState:
    """Stage, among those of both rings, and phase of a consumer's piece of that number."""
    return Ring(plan.stages // CONSUMERS).state_of_part(consumer, number)


def first_of_lane(role: Gatherer) -> Any:
    """Number of the lane's first slot."""
    return role.ctx.first_slot + role.ctx.thread


def ask_first(role: Gatherer) -> Any:
    """Load what names the lane's first row; nobody waits for it before `gather_pieces`."""
    return ask_slot(role, first_of_lane(role))


@cute.jit
def gather_pieces(role: Gatherer, asked: Int32, before: Any = 0) -> Int32:
    """All four warps: gather every step of a stretch; return its tiles up to those of the last step
    with a valid slot, or of the first step.

    Args:
        asked: result of `ask_first`. before: tiles that the warp's consumer had before.
    """
    ctx = role.ctx
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    lane = ctx.thread % WARP_SIZE
    consumer = warp // ctx.plan.tile_pieces
    first = first_of_lane(role)
    row = row_of_slot(role, first, asked)
    if ctx.num_tiles > consumer:
        # Asked for before it is known how many steps have a valid slot: one, at least.
        load_piece(role, row, Int32(before), first, lane)
    last = Int32(-1)
    if ctx.num_steps > 1:
        # Both wait for memory once, together.
        row, last = (
            read_slot(role, first + ctx.plan.tile.step_keys),
            last_slots(role, ctx.num_steps, lane),
        )
    num_tiles = find_extent(role, last, lane, 1)
    for step in cutlass.range(1, tiles_of_consumer(num_tiles, consumer), unroll=1):
        slot = first + step * ctx.plan.tile.step_keys
        following = slot + ctx.plan.tile.step_keys
        asked = ask_slot(role, following)
        load_piece(role, row, before + step, slot, lane)
        row = row_of_slot(role, following, asked)
    return num_tiles


@cute.jit
def gather_tiles(role: Gatherer, before: Int32) -> Int32:
    """All four warps: gather a stretch. Tiles that the warp's consumer had before it, and after."""
    num_tiles = gather_pieces(role, ask_first(role), before)
    warp = cute.arch.make_warp_uniform(role.ctx.thread // WARP_SIZE)
    return before + tiles_of_consumer(num_tiles, warp // role.ctx.plan.tile_pieces)


@cute.jit
def load_piece(role: Gatherer, row: Int32, tile: Int32, slot: Int32, lane: Int32) -> None:
    """One warp: load its piece of a tile, and write which keys are valid.

    Args:
        row: the lane's, negative where its slot is not valid.
        tile: its number among those of the warp's consumer. slot: the lane's.
    """
    ctx = role.ctx
    ring = RingProducer(ctx.memory.full, ctx.memory.free)
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    tile_pieces = ctx.plan.tile_pieces
    piece = tile * tile_pieces + warp % tile_pieces
    state = state_of_piece(ctx.plan, warp // tile_pieces, piece)
    # free: the consumer has read the piece before in this stage, and its mask.
    ring.acquire(state)
    mask = cute.arch.vote_ballot_sync(row >= 0)
    if lane == 0:
        ctx.memory.masks.array(Int32, ctx.plan.stages)[state.stage] = Int32(mask)
    form, pitch = ctx.plan.form, ctx.plan.row_pitch
    offset = state.stage * ctx.plan.piece_bytes + lane * pitch
    if row >= 0:
        pages = pages_of(role, slot)
        source, to = row_address(role, row, pages), ctx.memory.k.bytes() + offset
        if cutlass.const_expr(form.split):
            barrier = ring.full.at(state.stage)
            ring.full.expect_tx(Int32(form.data_bytes), state.stage)
            load_bytes(to, source, Int32(form.data_bytes), barrier)
            scales = scales_address(role, row, pages)
            for word in cutlass.range_constexpr(form.scale_bytes // 4):
                at = ctx.memory.k.address() + offset
                copy_word(at, scales, row, form.data_bytes + 4 * word, 4 * word)
            arrive_when_copied(barrier)
        else:
            barrier = ring.expect(state.stage, form.row_bytes)
            load_bytes(to, source, Int32(form.row_bytes), barrier)
    else:
        clear_row(ctx.memory.k.address() + offset, pitch)
        ring.commit(state.stage)


@cute.jit
def clear_row(to: Int32, pitch: cutlass.Constexpr) -> None:
    """Write zeros over a row that no slot names: 0 times its old bytes may be NaN."""
    for unit in cutlass.range(pitch // UNIT, unroll=1):
        store_words(to + unit * UNIT, [Int32(0)] * 4)
