"""Lists with gaps, slots that name no row, packed, so that no step multiplies what does not count.

The role gather looks at an item's first step. If it has many gaps, the ids that name a row are
counted, and if fewer steps have room for them they are written, one after the other, to the item's
rows of O, and read from there: nobody else reads or writes these before the item's end.

A list's bits depend on its ids up to the last one that names a row, not on what follows that: lists
of one step stay as they are, and so do those of which only the first step names rows.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from flashdsa.dsl.gmem import load_if, store1
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import BF16, ROWS
from flashdsa.kernels.attention.sm90.fwd.context import Context
from flashdsa.kernels.attention.sm90.fwd.draws import meet

ID_BYTES = 4
WARPS = WARPGROUP_SIZE // WARP_SIZE
LEAST_GAPS = 24
"""Gaps of a list's first step, for which the list is counted."""
TURNS = 4
"""Ids that a lane loads together. Cold calls wait for code, run or not: more take longer."""


class List(NamedTuple):
    """A list of ids."""

    line: Int64  # its address
    num_slots: Int32
    num_rows: Int32  # that exist


@cute.jit
def has_gaps(rows: list[Int32]) -> Boolean:
    """Whether a step has LEAST_GAPS; `rows`: the lane's slots of it, negative: not valid. All lanes
    call. Cold calls wait for this code, so it is short."""
    gaps = Int32(0)
    for row in rows:
        gaps += Int32(1) if row < 0 else Int32(0)
    return Boolean(Int32(cute.arch.warp_redux_sync(gaps, "add")) >= LEAST_GAPS)


@cute.jit
def rows_of_out(ctx: Context, out: cute.Tensor, item: Int32) -> tuple[Int64, Int32]:
    """(address of an item's rows of O, how many ids they have room for)."""
    query = item // ctx.blocks
    head = (item - query * ctx.blocks) * ROWS
    num_heads, d_v = Int32(out.shape[1]), out.shape[2]
    row = Int64(query) * num_heads + head
    room = cutlass.min(num_heads - head, Int32(ROWS)) * (d_v * BF16 // ID_BYTES)
    return (out.iterator + row * d_v).toint(), room


@cute.jit
def load_ids(of: List, first: Int32, end: Int32) -> list[Int32]:
    """Load the lane's ids from slot `first` to `end`, WARP_SIZE apart; negative: no row."""
    slots = [first + turn * WARP_SIZE for turn in range(TURNS)]
    named = [load_if(Int32(slot < end), of.line + slot * ID_BYTES) for slot in slots]
    ids = []
    for slot, one in zip(slots, named, strict=True):
        names_row = (slot < end) & (one < of.num_rows)
        ids.append(one if names_row else Int32(-1))
    return ids


@cute.jit
def pack(ctx: Context, of: List, to: Int64, room: Int32) -> List:
    """All four warps: pack a list. Return the packed one if it has fewer steps, else the list up to
    the last slot that names a row.

    Args:
        to, room: address of the packed list, and the number of ids that it may have.
    """
    warp, lane = cute.arch.make_warp_uniform(ctx.thread // WARP_SIZE), ctx.thread % WARP_SIZE
    step_keys, found = ctx.plan.tile.step_keys, ctx.memory.packed.array(Int32, 2 * WARPS)
    # Each warp has neighbouring slots.
    each = (of.num_slots + WARPGROUP_SIZE - 1) // WARPGROUP_SIZE * WARP_SIZE
    first, last = warp * each, cutlass.min((warp + 1) * each, of.num_slots)
    line, num_slots, place, end, turns = of.line, Int32(0), Int32(0), Int32(0), Int32(0)
    # The first turn counts; the second one writes, if there is one.
    while turns < 2:
        for slot in cutlass.range(first, last, TURNS * WARP_SIZE, unroll=1):
            ids = load_ids(of, slot + lane, last)
            for turn in cutlass.range_constexpr(TURNS):
                valid = Int32(cute.arch.vote_ballot_sync(ids[turn] >= 0))
                if (turns == 1) & (ids[turn] >= 0):
                    before = Int32(cute.arch.popc(valid & Int32(cute.arch.lanemask_lt())))
                    store1(to + (place + before) * ID_BYTES, ids[turn])
                place += Int32(cute.arch.popc(valid))
                if valid != 0:
                    end = slot + ((turn + 1) * WARP_SIZE - Int32(cute.arch.clz(valid)))
        turns += 1
        if turns == 1:
            if lane == 0:
                found[warp], found[WARPS + warp] = place, end
            meet()
            place = Int32(0)
            for other in cutlass.range_constexpr(WARPS):
                if other < warp:
                    place += found[other]
                num_slots += found[other]
                end = cutlass.max(end, found[WARPS + other])
            steps = (num_slots + step_keys - 1) // step_keys
            line = to
            if (num_slots > room) | (steps == (end + step_keys - 1) // step_keys):
                line, num_slots, turns = of.line, end, Int32(2)
    # All ids are written, and `found` is read.
    meet()
    return List(line, num_slots, of.num_rows)
