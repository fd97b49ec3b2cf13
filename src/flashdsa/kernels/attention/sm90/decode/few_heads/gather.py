"""Role gather: whole rows by bulk copies, one a lane; a warp has a piece of 32 keys of each step.

Rows keep their format in shared memory: the consumers bring them into registers. The pieces are a
ring for each consumer, which the two warps of its tiles fill: piece n is in stage n % stages. A
consumer releases both pieces of a tile, so no warp is a round before the other one, whichever of
them had a stage before.
"""

from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.pipeline import PipelineState, Ring, RingProducer
from flashdsa.dsl.smem import store_words
from flashdsa.dsl.tma import load_bytes
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import (
    CONSUMERS,
    PIECE_KEYS,
    FewHeadsPlan,
)
from flashdsa.kernels.attention.sm90.decode.shared.gather import (
    Gatherer,
    ask_slot,
    find_extent,
    last_slots,
    pages_of,
    read_slot,
    row_address,
    row_of_slot,
)

UNIT = 16
"""Bytes of a store."""


def tiles_of_consumer(num_tiles: Any, consumer: Any) -> Any:
    """Tiles of a consumer, of the CTA's `num_tiles`."""
    return (num_tiles + (CONSUMERS - 1) - consumer) // CONSUMERS


def state_of_piece(plan: FewHeadsPlan, consumer: Any, number: Any) -> PipelineState:
    """Stage, among those of both rings, and phase of a consumer's piece of that number."""
    return Ring(plan.stages // CONSUMERS).state_of_part(consumer, number)


@cute.jit
def gather_pieces(role: Gatherer, before: Any = 0) -> Int32:
    """All four warps: gather every step of a stretch; return its tiles up to those of the last step
    with a valid slot, or of the first step.

    Args:
        before: tiles that the warp's consumer had before.
    """
    ctx = role.ctx
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    lane = ctx.thread % WARP_SIZE
    consumer = warp // ctx.plan.tile_pieces
    first = ctx.first_slot + warp * PIECE_KEYS + lane
    row = read_slot(role, first)
    if ctx.num_tiles > consumer:
        # Asked for before it is known how many steps have a valid slot: one, at least.
        load_piece(role, row, Int32(before), lane)
    last = Int32(-1)
    if ctx.num_steps > 1:
        # Both wait for memory once, together.
        row, last = (
            read_slot(role, first + ctx.plan.tile.step_keys),
            last_slots(role, ctx.num_steps, lane),
        )
    num_tiles = find_extent(role, last, lane, 1)
    for step in cutlass.range(1, tiles_of_consumer(num_tiles, consumer), unroll=1):
        following = first + (step + 1) * ctx.plan.tile.step_keys
        asked = ask_slot(role, following)
        load_piece(role, row, before + step, lane)
        row = row_of_slot(role, following, asked)
    return num_tiles


@cute.jit
def load_piece(role: Gatherer, row: Int32, tile: Int32, lane: Int32) -> None:
    """One warp: load its piece of a tile, and write which keys are valid.

    Args:
        row: the lane's, negative where its slot is not valid.
        tile: its number among those of the warp's consumer.
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
    row_bytes = ctx.plan.form.row_bytes
    offset = state.stage * ctx.plan.piece_bytes + lane * row_bytes
    if row >= 0:
        barrier = ring.expect(state.stage, row_bytes)
        source = row_address(role, row, pages_of(role, Int32(0)))
        load_bytes(ctx.memory.k.bytes() + offset, source, Int32(row_bytes), barrier)
    else:
        clear_row(ctx.memory.k.address() + offset, row_bytes)
        ring.commit(state.stage)


@cute.jit
def clear_row(to: Int32, row_bytes: cutlass.Constexpr) -> None:
    """Write zeros over a row: 0 times its old bytes may be NaN."""
    for unit in cutlass.range(row_bytes // UNIT, unroll=1):
        store_words(to + unit * UNIT, [Int32(0)] * 4)
