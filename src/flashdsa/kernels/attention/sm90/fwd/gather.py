"""Role gather: row numbers, masks, rows and Q for the consumers.

All four warps bring every half of a tile together: the consumers wait for the half that was freed
last, and one warp alone takes four times as long for it (10% of the kernel's time).
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from flashdsa.dsl.pipeline import PipelineState, RingProducer
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.dsl.tma import load_box
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.gather import (
    HALVES,
    ROWS_AT_ONCE,
    SLOTS_A_LANE,
    TURNS,
    UNITS,
    copy_half,
)
from flashdsa.kernels.attention.sm90.core.tile import (
    CHUNK,
    CHUNK_BYTES,
    CHUNKS,
    LAST_OF_ALL,
    LAST_OF_ITEM,
    MASK_WORDS,
    ROWS,
    STEP_KEYS,
    TILES,
)
from flashdsa.kernels.attention.sm90.fwd.context import Context


class Gatherer(NamedTuple):
    """Fills q, k, masks and flags. Signals q_full, k0_full, k1_full, notes."""

    ctx: Context
    q_map: Any  # (S, H, 576), boxes of 1 x 64 x 64; of a group (S * H, 576), boxes of 64 x 64
    kv: cute.Tensor  # (S_kv, 576) bf16
    slots: cute.Tensor  # (queries or groups, any) int32: the rows that they name
    num_slots: cute.Tensor  # (queries or groups,) int32, or (0,): all of them
    members: Any  # of a group (groups, any) uint8: bit i, query i names the row; else None


class Cursor(NamedTuple):
    """A step: its item, its number in the item, and the item's length."""

    item: Int32
    list: Int32  # the row of `slots`
    step: Int32
    num_slots: Int32
    next_slots: Int32  # of the item after it


class Slots(NamedTuple):
    """This lane's slots of a step: lane, lane + 32, ..."""

    rows: list[Int32]  # of kv; negative: not valid
    members: list[Int32]  # bits, see Gatherer; [] without groups


@cute.jit
def slots_of(role: Gatherer, item: Int32) -> Int32:
    """Slots of the item that may be valid; any number after the last item."""
    count = Int32(role.slots.shape[1])
    if role.num_slots.shape[0] > 0:
        if item < role.ctx.num_items:
            given = (role.num_slots.iterator + item // role.ctx.blocks).load()
            count = cutlass.min(cutlass.max(given, Int32(0)), count)
    return count


@cute.jit
def first_step(role: Gatherer) -> Cursor:
    """The CTA's first step."""
    item = role.ctx.first_item
    behind = slots_of(role, item + role.ctx.num_ctas)
    return Cursor(item, item // role.ctx.blocks, Int32(0), slots_of(role, item), behind)


@cute.jit
def following(role: Gatherer, at: Cursor) -> Cursor:
    """The step after `at`: an item has one, even without a slot."""
    item, row, step = at.item, at.list, at.step + 1
    num_slots, next_slots = at.num_slots, at.next_slots
    if step * STEP_KEYS >= num_slots:
        item += role.ctx.num_ctas
        row = item // role.ctx.blocks
        step = Int32(0)
        num_slots = next_slots
        next_slots = slots_of(role, item + role.ctx.num_ctas)
    return Cursor(item, row, step, num_slots, next_slots)


@cute.jit
def read_slot(role: Gatherer, at: Cursor, slot: Int32) -> tuple[Int32, Int32]:
    """The kv row that the slot names, negative where it is not valid, and its members."""
    row, members = Int32(-1), Int32(0)
    if slot < at.num_slots and at.item < role.ctx.num_items:
        place = Int64(at.list) * role.slots.shape[1] + slot
        row = (role.slots.iterator + place).load()
        if row >= role.kv.shape[0]:
            row = Int32(-1)
        if cutlass.const_expr(role.members is not None):
            members = Int32((role.members.iterator + place).load())
    return row, members


@cute.jit
def read_slots(role: Gatherer, at: Cursor, lane: Int32) -> Slots:
    """This lane's slots of the step."""
    first = at.step * STEP_KEYS + lane
    found = [read_slot(role, at, first + WARP_SIZE * i) for i in range(SLOTS_A_LANE)]
    members = [one[1] for one in found] if cutlass.const_expr(role.members is not None) else []
    return Slots([one[0] for one in found], members)


@cute.jit
def write_note(
    role: Gatherer, slots: Slots, flags: Int32, lane: Int32, tile: cutlass.Constexpr
) -> None:
    """One warp: write which keys of the tile each query has, and what follows the step."""
    plan = role.ctx.plan
    masks = role.ctx.arena.array("masks", Int32, TILES * plan.group * MASK_WORDS)
    for query in cutlass.range_constexpr(plan.group):
        for word in cutlass.range_constexpr(MASK_WORDS):
            number = tile * MASK_WORDS + word
            valid = slots.rows[number] >= 0
            if cutlass.const_expr(plan.group > 1):
                valid = (slots.members[number] >> query) & 1 == 1
            mask = cute.arch.vote_ballot_sync(valid)
            if lane == 0:
                masks[(tile * plan.group + query) * MASK_WORDS + word] = Int32(mask)
    if lane == 0:
        role.ctx.arena.array("flags", Int32, TILES)[tile] = flags
        role.ctx.barriers("notes").arrive(tile)


@cute.jit
def load_query(role: Gatherer, at: Cursor) -> None:
    """One thread: load the item's rows of Q; those past the last one become zeros."""
    ctx = role.ctx
    barrier = ctx.barriers("q_full")
    barrier.arrive_and_expect_tx()
    for chunk in cutlass.range_constexpr(CHUNKS):
        to = ctx.arena.bytes("q") + chunk * CHUNK_BYTES
        place = [Int32(chunk * CHUNK), (at.item - at.list * ctx.blocks) * ROWS, at.list]
        if cutlass.const_expr(ctx.plan.group > 1):
            place = [Int32(chunk * CHUNK), at.item * ROWS]
        load_box(to, role.q_map, place, barrier.at())


@cute.jit
def gather_all(role: Gatherer) -> None:
    """All four warps: gather every step of the CTA."""
    ctx = role.ctx
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    lane = ctx.thread % WARP_SIZE
    unit, row_of_turn = ctx.thread % UNITS, ctx.thread // UNITS
    to = ctx.arena.address("k") + swizzled_128(row_of_turn, unit)
    at = first_step(role)
    slots = read_slots(role, at, lane)
    number, items = Int32(0), Int32(0)
    more = Boolean(at.item < ctx.num_items)
    while more:
        ahead = following(role, at)
        more = ahead.item < ctx.num_items
        flags = Int32(0)
        if ahead.step == 0:
            flags = Int32(LAST_OF_ITEM) if more else Int32(LAST_OF_ITEM | LAST_OF_ALL)
        rows = [
            cute.arch.shuffle_sync(
                slots.rows[turn * ROWS_AT_ONCE // WARP_SIZE],
                turn * ROWS_AT_ONCE % WARP_SIZE + row_of_turn,
            )
            for turn in range(TILES * TURNS)
        ]
        if at.step == 0:
            if warp == 0:
                if lane == 0:
                    # q_free: both consumers have the last scores of the item before.
                    ctx.barriers("q_free").wait_for(items - 1)
                    load_query(role, at)
                cute.arch.sync_warp()
            items += 1
        phase = ctx.phase(number)
        for half in cutlass.range_constexpr(len(HALVES)):
            tile, free, _ = HALVES[half]
            # The consumer has read the half in the step before, and with it the tile's note.
            ring = RingProducer(ctx.barriers(f"k{tile}_full"), ctx.barriers(free))
            ring.acquire(PipelineState(Int32(tile), phase))
            copy_half(role, rows, to, unit, half)
            # This follows the copies, which the consumers wait for longer.
            if cutlass.const_expr(half == 0 or half == 2):
                if warp == tile:
                    write_note(role, slots, flags, lane, tile)
        slots = read_slots(role, ahead, lane)
        at = ahead
        number += 1
