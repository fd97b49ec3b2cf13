"""The load warps: keep the pages of work tiles in flight, a stage of several pages at a time.

Where the table has a slot for each token, rows are gathered, four at a time. A lane has four
neighbouring tokens of a stage and one gather4 for their keys. Of a token that is not there, as the
row of the table ends or its slot is outside the cache, the key is another's of the four, and the
lane's word of page_valid masks it: a gather takes 1 to 4 rows. With none of the four there, the
rows are beyond the cache's end, and come as zeros.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.cp_async import arrive_when_copied, copy_word
from flashdsa.dsl.gather4 import gather4
from flashdsa.dsl.tma import EVICT_FIRST, load_box, load_bytes
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.load_tiles import (
    LoadContext,
    TileLoader,
    acquire_stage,
    announce,
    describe,
    finish,
    page_table,
)
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile, request_of
from flashdsa.kernels.indexer.sizes import CACHE_ROW_BYTES
from flashdsa.kernels.indexer.sm100.plan import GATHERED, PAGE_SCALE_BYTES, IndexerPlan
from flashdsa.problem import PAGE_KEY_BYTES, PAGE_SIZE, SCALE_BYTES


@cute.jit
def load_pages(
    ctx: LoadContext,
    tile: WorkTile,
    first_ids: Int32,
    depth: Any,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Load this warp's stages of the tile into the ring. first_ids: what `announce` returned.
    depth: stages in flight, in steps of 1 / DEPTH_STEPS; None: all stages."""
    count, pages, warps = tile.num_pages, plan.pages_per_stage, plan.load_warps
    table = page_table(ctx, tile)
    ahead = first_ids  # this lane's page id of the next 32
    for block in cutlass.range(0, count, WARP_SIZE, unroll=1):
        ids = ahead
        if block + WARP_SIZE + lane < count:
            ahead = (table + block + WARP_SIZE + lane).load()
        number = (tile.first_number + block) // pages
        first = (ctx.warp + warps - number % warps) % warps
        stop = (cutlass.min(count - block, Int32(WARP_SIZE)) + pages - 1) // pages
        for i in cutlass.range(first, stop, warps, unroll=1):
            named = []
            for page in cutlass.range_constexpr(pages):
                index = i * pages + page
                named.append(page_or_none(cute.arch.shuffle_sync(ids, index), block + index, count))
            load_stage(ctx, named, number + i, depth, lane, plan)


@cute.jit
def page_or_none(page: Int32, index: Int32, count: Int32) -> Int32:
    """The page id; -1 past the tile's last page."""
    return page if index < count else Int32(-1)


@cute.jit
def load_stage(
    ctx: LoadContext,
    named: Sequence[Int32],
    number: Int32,
    depth: Any,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Load pages into their stage. An id outside the cache is passed on as invalid: its keys are
    0."""
    ring, num_pages = ctx.inputs.page_ring, ctx.pages.cache.shape[0]
    state = ring.state(number)
    stage = state.stage
    if lane == 0:
        acquire_stage(ring, number, state, depth, plan)
        slots = []
        for index, page in enumerate(named):
            valid = page >= 0 and page < num_pages
            slot = stage * plan.pages_per_stage + index
            ctx.inputs.page_valid[slot] = Int32(1) if valid else Int32(0)
            slots.append((slot, page if valid else num_pages, page if valid else Int32(0)))
        # page_full[stage]: this arrival releases page_valid, too; the phase ends with the last byte
        # of the copies, which are as many for bad pages: what a box has beyond the cache's end is
        # 0, and the scales are the first page's. It orders the copies after the consumers' reads,
        # which page_empty ordered before.
        cute.arch.fence_proxy("async.shared", space="cta")
        full = ring.expect(stage)
        for slot, box_page, scale_page in slots:
            load_box(
                ctx.inputs.pages + slot * PAGE_KEY_BYTES,
                ctx.keys_map,
                [Int32(0), Int32(0), box_page],
                full,
                EVICT_FIRST,
            )
            load_bytes(
                ctx.memory.scales.bytes() + slot * PAGE_SCALE_BYTES,
                ctx.pages.cache.iterator
                + (Int64(scale_page) * ctx.pages.cache.stride[0] + PAGE_KEY_BYTES),
                PAGE_SCALE_BYTES,
                full,
            )


PAGES = TileLoader(announce, load_pages, finish)
"""Tiles with pages to score."""


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
    row = Int64(request_of(ctx.rows, tile.row)) * ctx.pages.block_table.stride[0]
    return ctx.pages.block_table.iterator + (row + tile.first_page * PAGE_SIZE)


@cute.jit
def tokens_of(tile: WorkTile) -> Int32:
    """Tokens of the tile."""
    return cutlass.min(tile.num_pages * PAGE_SIZE, tile.length - tile.first_page * PAGE_SIZE)


@cute.jit
def announce_tokens(
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
    """Load this warp's stages of the tile into the ring. first_slots: what `announce_tokens`
    returned. depth: stages in flight, in steps of 1 / DEPTH_STEPS; None: all stages."""
    pages, warps = plan.pages_per_stage, plan.load_warps
    number = tile.first_number // pages
    stages = (tile.num_pages + pages - 1) // pages
    table, count = slot_table(ctx, tile), tokens_of(tile)
    ahead = first_slots
    for i in cutlass.range(first_stage(ctx, tile, plan), stages, warps, unroll=1):
        slots = ahead
        ahead = slots_from(table, (i + warps) * plan.stage_tokens + lane * GATHERED, count)
        load_token_stage(ctx, slots, number + i, depth, lane, plan)


@cute.jit
def load_token_stage(
    ctx: LoadContext, slots: Tokens, number: Int32, depth: Any, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Load a stage's tokens, this lane's four of them."""
    ring, num_pages = ctx.inputs.page_ring, ctx.pages.cache.shape[0]
    state = ring.state(number)
    stage = state.stage
    acquire_stage(ring, number, state, depth, plan)
    page_rows = Int32(ctx.pages.cache.stride[0] // CACHE_ROW_BYTES)  # from a page to the next one
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
    scales = (ctx.memory.scales.bytes() + first * SCALE_BYTES).toint()
    rows = cute.make_rmem_tensor(GATHERED, Int32)
    for k in cutlass.range_constexpr(GATHERED):
        rows[k], offset, none = spare, Int64(0), Int32(-1)
        if is_in(slots[k], num_pages):
            rows[k], none = row_of(slots[k], page_rows), Int32(0)
            offset = scale_offset(slots[k], ctx.pages.cache)
        copy_word(scales, ctx.pages.cache.iterator + offset, none, k * SCALE_BYTES, 0)
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


TOKENS = TileLoader(announce_tokens, load_tokens, finish)
"""Tiles whose tokens lie apart."""


def loader_of(plan: IndexerPlan) -> TileLoader:
    """The plan's way to load tiles."""
    return TOKENS if plan.gathers else PAGES
