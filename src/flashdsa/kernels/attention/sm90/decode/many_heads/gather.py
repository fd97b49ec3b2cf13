"""Role gather: whole rows by bulk copies, one a lane. Each warp has eight rows of each piece of 32
keys: a copy takes 90 clocks to issue, and so a piece comes soon after it is free.
"""

from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.pipeline import RingProducer
from flashdsa.dsl.tma import load_bytes
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import TILES
from flashdsa.kernels.attention.sm90.decode.key_rows.copies import clear_row
from flashdsa.kernels.attention.sm90.decode.key_rows.plan import PIECE_KEYS
from flashdsa.kernels.attention.sm90.decode.shared.context import steps_of
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

WARP_ROWS = 8
"""Rows of a piece that a warp has."""


@cute.jit
def gather_steps(role: Gatherer, before: Any = 0) -> Int32:
    """All four warps: gather every step; return the steps of the CTA up to its last one.

    Args:
        before: steps that the CTA had before.
    """
    ctx = role.ctx
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    lane = ctx.thread % WARP_SIZE
    first = ctx.first_slot + lane // WARP_ROWS * PIECE_KEYS + warp * WARP_ROWS + lane % WARP_ROWS
    row = read_slot(role, first)
    if ctx.num_tiles > 0:
        # Asked for before it is known how many steps have a valid slot: one, at least.
        load_step(role, row, Int32(before), first)
    last = Int32(-1)
    if ctx.num_steps > 1:
        # Both wait for memory once, together.
        row, last = (
            read_slot(role, first + ctx.plan.tile.step_keys),
            last_slots(role, ctx.num_steps, lane),
        )
    num_steps = steps_of(find_extent(role, last, lane, 1))
    for step in cutlass.range(1, num_steps, unroll=1):
        slot = first + step * ctx.plan.tile.step_keys
        following = slot + ctx.plan.tile.step_keys
        asked = ask_slot(role, following)
        load_step(role, row, before + step, slot)
        row = row_of_slot(role, following, asked)
    return before + num_steps


@cute.jit
def load_step(role: Gatherer, row: Int32, step: Int32, slot: Int32) -> None:
    """One warp: load its rows of a step's pieces, and write which keys are valid.

    Args:
        row: the lane's, negative where its slot is not valid.
        step: its number among those of the CTA. slot: the lane's.
    """
    ctx = role.ctx
    ring = RingProducer(ctx.memory.full, ctx.memory.free)
    lane = ctx.thread % WARP_SIZE
    pieces = TILES * ctx.plan.tile_pieces
    first = step * pieces
    valid = cute.arch.vote_ballot_sync(row >= 0)
    for piece in cutlass.range(pieces, unroll=1):
        state = ring.state(first + piece)
        # free: both consumers have read the piece before in this stage, and its mask.
        ring.acquire(state)
        # All lanes have seen that, before some fill the stage: it may soon be free again.
        cute.arch.sync_warp()
        if lane // WARP_ROWS == piece:
            load_row(role, row, state.stage, slot, valid >> lane)


@cute.jit
def load_row(role: Gatherer, row: Int32, stage: Int32, slot: Int32, valid: Int32) -> None:
    """Load the lane's row of a piece.

    Args:
        valid: of the warp's rows from the lane's on, a bit each.
    """
    ctx = role.ctx
    ring = RingProducer(ctx.memory.full, ctx.memory.free)
    warp, number = ctx.thread // WARP_SIZE, ctx.thread % WARP_ROWS
    offset = stage * ctx.plan.piece_bytes + (warp * WARP_ROWS + number) * ctx.plan.row_pitch
    if number == 0:
        store_byte(ctx.memory.masks.address() + stage * 4 + warp, valid)
    if row >= 0:
        source = row_address(role, row, pages_of(role, slot))
        barrier = ring.expect(stage, ctx.plan.form.row_bytes)
        load_bytes(ctx.memory.k.bytes() + offset, source, Int32(ctx.plan.form.row_bytes), barrier)
    else:
        clear_row(ctx.memory.k.address() + offset, ctx.plan.row_pitch)
        ring.commit(stage)


def store_byte(address: Any, word: Any) -> None:
    """Store the low 8 bits of a word to shared memory."""
    cute.arch.inline_ptx(
        "{ .reg .b16 half; cvt.u16.u32 half, {$r1}; st.shared.b8 [{$r0}], half; }",
        read_only_args=[address, word],
    )
