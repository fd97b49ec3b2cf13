"""The load warps where the table has a slot for each token: rows gathered, four at a time.

A lane has four neighbouring tokens of a stage and one gather4 for their keys. Of a token that is
not there, as the row of the table ends or its slot is outside the cache, the key is another's of
the four, and the lane's word of page_valid masks it: a gather takes 1 to 4 rows. With none of the
four there, the rows are beyond the cache's end, and come as zeros.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import arrive_when_copied, copy_word
from flashdsa.dsl.gather4 import gather4
from flashdsa.kernels.indexer.load_tiles import TileLoader, acquire_stage, describe, finish
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile, request_of
from flashdsa.kernels.indexer.sizes import CACHE_ROW_BYTES
from flashdsa.kernels.indexer.sm100.load import PAGES, LoadContext
from flashdsa.kernels.indexer.sm100.plan import GATHERED, IndexerPlan
from flashdsa.problem import PAGE_KEY_BYTES, PAGE_SIZE, SCALE_BYTES


class Tokens(NamedTuple):
    """Slots of a lane's four neighbouring tokens; -1: there is none."""

    slot0: Int32
    slot1: Int32
    slot2: Int32
    slot3: Int32


@cute.jit
def slots_from(table: Any, first: Int32, count: Int32) -> Tokens:
    """The slots of the tokens from `first` on, of the `count` that `table` has."""
    slots = cute.make_rmem_tensor(GATHERED, Int32)
    for k in cutlass.range_constexpr(GATHERED):
        slots[k] = Int32(-1)
        if first + k < count:
            slots[k] = (table + (first + k)).load()
    return Tokens(*(slots[k] for k in range(GATHERED)))


@cute.jit
def first_stage(ctx: LoadContext, tile: WorkTile, plan: cutlass.Constexpr) -> Int32:
    """The first of the tile's stages that the calling warp fills."""
    number, warps = tile.first_number // plan.pages_per_stage, plan.load_warps
    return (ctx.warp + warps - number % warps) % warps


def slot_table(ctx: LoadContext, tile: WorkTile) -> Any:
    """Pointer to the slots of the tile's tokens."""
    row = Int64(request_of(ctx.rows, tile.row)) * ctx.block_table.stride[0]
    return ctx.block_table.iterator + (row + tile.first_page * PAGE_SIZE)


@cute.jit
def tokens_of(tile: WorkTile) -> Int32:
    """Tokens of the tile."""
    return cutlass.min(tile.num_pages * PAGE_SIZE, tile.length - tile.first_page * PAGE_SIZE)


@cute.jit
def announce(
    ctx: LoadContext, number: Int32, tile: WorkTile, lane: Int32, plan: cutlass.Constexpr
) -> Tokens:
    """Announce a tile; return this lane's slots of the warp's first stage."""
    first = first_stage(ctx, tile, plan) * plan.stage_tokens + lane * GATHERED
    slots = slots_from(slot_table(ctx, tile), first, tokens_of(tile))  # on their way meanwhile
    describe(ctx, number, tile, lane, plan)
    return slots


@cute.jit
def load_tokens(
    ctx: LoadContext,
    tile: WorkTile,
    first_slots: Tokens,
    depth: Any,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Load this warp's stages of the tile into the ring.

    Args:
        first_slots: what `announce` returned.
        depth: stages in flight, in steps of 1 / DEPTH_STEPS; None: all stages.
    """
    pages, warps = plan.pages_per_stage, plan.load_warps
    number = tile.first_number // pages
    stages = (tile.num_pages + pages - 1) // pages
    table, count = slot_table(ctx, tile), tokens_of(tile)
    ahead = first_slots
    for i in cutlass.range(first_stage(ctx, tile, plan), stages, warps, unroll=1):
        slots = ahead
        ahead = slots_from(table, (i + warps) * plan.stage_tokens + lane * GATHERED, count)
        load_stage(ctx, slots, number + i, depth, lane, plan)


@cute.jit
def load_stage(
    ctx: LoadContext,
    slots: Tokens,
    number: Int32,
    depth: Any,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Load a stage's tokens, this lane's four of them."""
    ring, num_pages = ctx.inputs.page_ring, ctx.cache.shape[0]
    state = ring.state(number)
    stage = state.stage
    acquire_stage(ring, number, state, depth, plan)
    page_rows = Int32(ctx.cache.stride[0] // CACHE_ROW_BYTES)  # from a page to the next one
    present, spare = Int32(0), num_pages * page_rows
    for k in cutlass.range_constexpr(GATHERED):
        if is_in(slots[k], num_pages):
            present = present | (1 << k)
            spare = row_of(slots[k], page_rows)
    ctx.inputs.page_valid[stage * plan.valid_words + lane] = present
    # page_full[stage]: the first lane's arrival releases the words of page_valid, which all lanes
    # have written by then, and announces the keys' bytes; the phase ends with the last of them, and
    # with the arrivals of all lanes, whose scales have come. page_empty ordered the readers of what
    # the stage held before.
    cute.arch.sync_warp()
    if lane == 0:
        ring.expect(stage)
    cute.arch.sync_warp()
    full = ring.full.at(stage)
    first = stage * plan.stage_tokens + lane * GATHERED
    scales = (ctx.scales + first * SCALE_BYTES).toint()
    rows = cute.make_rmem_tensor(GATHERED, Int32)
    for k in cutlass.range_constexpr(GATHERED):
        rows[k], offset, none = spare, Int64(0), Int32(-1)
        if is_in(slots[k], num_pages):
            rows[k], none = row_of(slots[k], page_rows), Int32(0)
            offset = scale_offset(slots[k], ctx.cache)
        copy_word(scales, ctx.cache.iterator + offset, none, k * SCALE_BYTES, 0)
    keys = (ctx.inputs.pages + first * CACHE_ROW_BYTES).toint()
    gather4(keys, ctx.keys_map, 0, [rows[k] for k in range(GATHERED)], full)
    arrive_when_copied(full)


@cute.jit
def is_in(slot: Int32, num_pages: Int32) -> cutlass.Boolean:
    """Whether the cache has the slot."""
    return slot >= 0 and slot // PAGE_SIZE < num_pages


def row_of(slot: Int32, page_rows: Int32) -> Int32:
    """Number of the slot's key among the cache's rows of 128 bytes."""
    return slot // PAGE_SIZE * page_rows + slot % PAGE_SIZE


def scale_offset(slot: Int32, cache: cute.Tensor) -> Int64:
    """Offset of the slot's scale in the cache, in bytes."""
    page = Int64(slot // PAGE_SIZE) * cache.stride[0]
    return page + (PAGE_KEY_BYTES + slot % PAGE_SIZE * SCALE_BYTES)


TOKENS = TileLoader(announce, load_tokens, finish)
"""Tiles whose tokens lie apart."""


def loader_of(plan: IndexerPlan) -> TileLoader:
    """The plan's way to load tiles."""
    return TOKENS if plan.gathers else PAGES
