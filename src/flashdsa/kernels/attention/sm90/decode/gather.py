"""Role gather for bf16 rows: row numbers, masks, rows and Q for the consumers."""

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
    MASK_WORDS,
    STEP_KEYS,
    TILES,
)
from flashdsa.kernels.attention.sm90.decode.context import Context, steps_of


class Gatherer(NamedTuple):
    """Fills q, k and masks. Signals q_full, k0_full, k1_full, notes."""

    ctx: Context
    q_map: Any  # (S, H, 576), boxes of 1 x 64 x 64
    kv: cute.Tensor  # (S_kv, 576) bf16, or (S_kv, 656) bytes
    indices: cute.Tensor  # (S, topk) int32


@cute.jit
def read_slot(role: Gatherer, slot: Int32) -> Int32:
    """The kv row that a slot of the query names, negative where it is not valid."""
    row = Int32(-1)
    if slot < role.ctx.end_slot:
        row = (
            role.indices.iterator + (Int64(role.ctx.query) * role.indices.shape[1] + slot)
        ).load()
        if row >= role.kv.shape[0]:
            row = Int32(-1)
    return row


@cute.jit
def read_slots(role: Gatherer, step: Int32, lane: Int32) -> list[Int32]:
    """This lane's slots of a step of the CTA: lane, lane + 32, ..."""
    first = role.ctx.first_slot + step * STEP_KEYS + lane
    return [read_slot(role, first + WARP_SIZE * i) for i in range(SLOTS_A_LANE)]


@cute.jit
def last_slots(role: Gatherer, num_steps: Int32, lane: Int32) -> Int32:
    """Bitwise and of this lane's slots of the last of `num_steps` steps: negative if none is
    valid."""
    slots = read_slots(role, cutlass.max(num_steps - 1, Int32(0)), lane)
    together = slots[0]
    for slot in slots[1:]:
        together = together & slot
    return together


@cute.jit
def find_extent(role: Gatherer, last: Int32, lane: Int32, least: cutlass.Constexpr = 0) -> Int32:
    """All warps: return the tiles up to those of the last step with a valid slot; tell the
    consumers.

    Args:
        last: `last_slots` of all steps, if they are more than `least`.
        least: minimum of the result's steps, their slots valid or not, if the CTA has them.
    """
    ctx = role.ctx
    num_steps = ctx.num_steps
    more = Boolean(num_steps > least)
    while more:
        if cute.arch.vote_any_sync(last >= 0):
            more = Boolean(False)
        else:
            num_steps -= 1
            more = num_steps > least
            last = last_slots(role, num_steps, lane)
    num_tiles = cutlass.min(num_steps * TILES, ctx.num_tiles)
    if ctx.thread == 0:
        ctx.arena.array("extent", Int32, 1)[0] = num_tiles
        ctx.barriers("extent_full").arrive()
    return num_tiles


@cute.jit
def write_note(role: Gatherer, slots: list[Int32], lane: Int32, tile: Any) -> None:
    """One warp: write which keys of the tile are valid.

    Args:
        slots: the lane's of the tile: lane, lane + 32.
    """
    masks = role.ctx.arena.array("masks", Int32, TILES * MASK_WORDS)
    for word in cutlass.range_constexpr(MASK_WORDS):
        mask = cute.arch.vote_ballot_sync(slots[word] >= 0)
        if lane == 0:
            masks[tile * MASK_WORDS + word] = Int32(mask)
    if lane == 0:
        role.ctx.barriers("notes").arrive(tile)


def row_of_turn(slots: list[Int32], turn: int, number: Any) -> Any:
    """The kv row of which this thread copies 16 bytes: that of number `number` of a turn's keys."""
    return cute.arch.shuffle_sync(
        slots[turn * ROWS_AT_ONCE // WARP_SIZE], turn * ROWS_AT_ONCE % WARP_SIZE + number
    )


@cute.jit
def load_query(role: Gatherer) -> None:
    """Load the item's rows of Q, before anything else; those past the last head become zeros.

    Nothing is loaded if the CTA has no slot. If none of its slots is valid nobody multiplies Q, but
    both consumers wait for it.
    """
    ctx = role.ctx
    if ctx.num_steps > 0 and ctx.thread == 0:
        barrier = ctx.barriers("q_full")
        barrier.arrive_and_expect_tx()
        for chunk in cutlass.range_constexpr(CHUNKS):
            to = ctx.arena.bytes("q") + chunk * CHUNK_BYTES
            load_box(to, role.q_map, [Int32(chunk * CHUNK), ctx.head, ctx.query], barrier.at())
    cute.arch.sync_warp()


def acquire(ctx: Context, free: str, tile: int, step: Any) -> None:
    """Wait until the consumer has read the half in the step before, and with it the note."""
    ring = RingProducer(ctx.barriers(f"k{tile}_full"), ctx.barriers(free))
    ring.acquire(PipelineState(Int32(tile), ctx.phase(step)))


@cute.jit
def gather_rows(role: Gatherer) -> None:
    """All four warps: gather every step of the CTA."""
    ctx = role.ctx
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    lane = ctx.thread % WARP_SIZE
    unit, number = ctx.thread % UNITS, ctx.thread // UNITS
    to = ctx.arena.address("k") + swizzled_128(number, unit)
    load_query(role)
    slots = read_slots(role, Int32(0), lane)
    last = last_slots(role, ctx.num_steps, lane)
    num_tiles = find_extent(role, last, lane)
    for step in cutlass.range(steps_of(num_tiles), unroll=1):
        rows = [row_of_turn(slots, turn, number) for turn in range(TILES * TURNS)]
        ahead = read_slots(role, step + 1, lane)
        for half in cutlass.range_constexpr(len(HALVES)):
            tile, free, _ = HALVES[half]
            if step * TILES + tile < num_tiles:
                acquire(ctx, free, tile, step)
                copy_half(role, rows, to, unit, half)
                if cutlass.const_expr(half == 0 or half == 2):
                    if warp == tile:
                        of_tile = slots[tile * MASK_WORDS : (tile + 1) * MASK_WORDS]
                        write_note(role, of_tile, lane, tile)
        slots = ahead
