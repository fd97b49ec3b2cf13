"""Role gather for bf16 rows: row numbers, masks, rows and Q for the consumers."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.gather import (
    acquire,
    copies_of_thread,
    copy_half,
    halves_of_step,
    row_of_turn,
    turns_of,
)
from flashdsa.kernels.attention.sm90.core.tile import TILES
from flashdsa.kernels.attention.sm90.decode.shared import context, gather


class Before(NamedTuple):
    """Work of the CTA before a stretch, in one register: a number of stretches, and whether each
    tile's uses are odd, as each use completes a phase of the tile's barriers. A stretch's last step
    may have one tile, so tile 1 may have fewer uses."""

    bits: Any  # the number above one bit a tile

    @property
    def stretches(self) -> Any:
        return self.bits >> TILES

    def use(self, tile: Any, step: Any) -> Any:
        """Number of the use of a tile by a step of the stretch, or of another one of its parity."""
        return (self.bits >> tile & 1) + step

    def after(self, num_tiles: Any) -> "Before":
        """The work before the next stretch; this one had `num_tiles`."""
        odd = [self.use(0, context.steps_of(num_tiles)) & 1, self.use(1, num_tiles // TILES) & 1]
        return Before((self.stretches + 1) << TILES | odd[1] << 1 | odd[0])


NOTHING = Before(0)
"""Before the only stretch of a CTA of a cluster."""


@cute.jit
def store_masks(role: gather.Gatherer, slots: list[Int32], lane: Int32, tile: Any) -> None:
    """One warp: store which keys are valid. `slots`: the lane's of the tile: lane, lane + 32."""
    mask_words = role.ctx.plan.tile.mask_words
    masks = role.ctx.memory.masks.array(Int32, TILES * mask_words)
    for word in cutlass.range_constexpr(mask_words):
        mask = cute.arch.vote_ballot_sync(slots[word] >= 0)
        if lane == 0:
            masks[tile * mask_words + word] = Int32(mask)
    if lane == 0:
        role.ctx.memory.masks_full.arrive(tile)


@cute.jit
def gather_rows(role: gather.Gatherer, before: Before, asked: gather.Asked) -> Int32:
    """All four warps: gather every step of a stretch; return its tiles up to those of the last step
    with a valid slot. `asked`: result of `ask_ends`."""
    ctx = role.ctx
    tile = ctx.plan.tile
    warp = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE)
    lane = ctx.thread % WARP_SIZE
    copies = copies_of_thread(ctx)
    slots, last = gather.slots_of_ends(role, asked, lane)
    num_tiles = gather.find_extent(role, last, lane)
    for step in cutlass.range(context.steps_of(num_tiles), unroll=1):
        rows = [row_of_turn(slots, turn, copies.row) for turn in range(TILES * turns_of(tile))]
        of_next = gather.ask_slots(role, step + 1, lane)
        for number in cutlass.range_constexpr(len(halves_of_step(tile))):
            half = halves_of_step(tile)[number]
            if step * TILES + half.tile < num_tiles:
                acquire(ctx, half, ctx.phase(before.use(half.tile, step)))
                slot = ctx.first_slot + step * tile.step_keys + half.tile * tile.keys
                copy_half(ctx, gather.first_row_of(role, slot), rows, copies, number)
                if cutlass.const_expr(number == 0 or number == 2):
                    if warp == half.tile:
                        first = half.tile * tile.mask_words
                        of_tile = slots[first : first + tile.mask_words]
                        store_masks(role, of_tile, lane, half.tile)
        slots = gather.rows_of_slots(role, step + 1, of_next, lane)
    return num_tiles
