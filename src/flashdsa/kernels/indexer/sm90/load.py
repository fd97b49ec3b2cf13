"""The load warps: announce a work tile and keep its pages in flight."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from flashdsa.dsl.pipeline import PipelineState, RingProducer, acquire_reused
from flashdsa.dsl.tma import EVICT_FIRST, EVICT_LAST, load_box, load_bytes
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.schedule.tile_loader import TileLoader
from flashdsa.kernels.indexer.schedule.work_tile import Rows, WorkTile, write_tile
from flashdsa.kernels.indexer.sizes import DEPTH_STEPS
from flashdsa.kernels.indexer.sm90.plan import PAGE_ROWS
from flashdsa.kernels.indexer.smem_views import InputBuffers

SPREAD = 5
"""Its multiples modulo DEPTH_STEPS are all steps, and neighbouring ones are far apart."""


class LoadContext(NamedTuple):
    """Role load: arrives at page_full and tile_full, waits for page_empty and tile_empty."""

    inputs: InputBuffers  # the producer's end
    keys_map: Any  # pointer to the pages' tensor map; None: there are no pages
    queries_map: Any  # pointer to the tensor map of the rows' queries; None: likewise
    weights: Any  # (B, H) fp32, device memory
    block_table: Any  # (B, max_pages) int32, device memory
    num_pages: Int32  # pages of the cache
    rows: Rows
    warp: Int32  # among the role's; the first one announces tiles


@cute.jit
def announce(
    ctx: LoadContext, number: Int32, tile: WorkTile, lane: Int32, plan: cutlass.Constexpr
) -> Int32:
    """Description, queries and weights of a tile; returns the id of its page `lane`."""
    ids = ask_for_ids(ctx, tile, lane)  # on their way while the tile is announced
    describe(ctx, number, tile, lane, plan)
    return ids


@cute.jit
def describe(
    ctx: LoadContext, number: Int32, tile: WorkTile, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """The first warp: a tile's description, and its row's queries and weights if pages follow."""
    if ctx.warp == 0:
        ring = ctx.inputs.tile_ring
        state = ring.state(number)
        # tile_empty[stage], the phase before: every consumer warp has left the tile that was here.
        # Description, queries and weights of the stage may be overwritten.
        acquire_reused(ring, state, number)
        if lane == 0:
            write_tile(ctx.inputs.tiles, state.stage, tile)
            # tile_full[stage]: this thread's arrival releases its description, too; the phase ends
            # with the last byte of the copies.
            if const_expr(ctx.queries_map is None):
                ring.commit(state.stage)
            else:
                load_query(ctx, state.stage, tile.row, plan)
    cute.arch.sync_warp()


@cute.jit
def finish(ctx: LoadContext, number: Int32, lane: Int32, plan: cutlass.Constexpr) -> None:
    """Say that no tile comes any more."""
    if ctx.warp == 0:
        ring = ctx.inputs.tile_ring
        state = ring.state(number)
        # tile_empty[stage]: as for a tile.
        acquire_reused(ring, state, number)
        if lane == 0:
            nothing = WorkTile(Int32(-1), *(Int32(0) for _ in WorkTile._fields[1:]))
            write_tile(ctx.inputs.tiles, state.stage, nothing)
            ring.commit(state.stage)
    cute.arch.sync_warp()


@cute.jit
def load_query(ctx: LoadContext, stage: Int32, row: Int32, plan: cutlass.Constexpr) -> None:
    """Arrive at tile_full and start the copies of the row's queries and weights."""
    full = ctx.inputs.tile_ring.expect(stage)
    load_box(
        ctx.inputs.queries + stage * plan.query_bytes,
        ctx.queries_map,
        [Int32(0), row * plan.num_heads],
        full,
        EVICT_LAST,
    )
    load_bytes(
        ctx.inputs.weights.iterator + stage * plan.num_heads,
        ctx.weights.iterator + Int64(row) * plan.num_heads,
        plan.weight_bytes,
        full,
    )


def page_table(ctx: LoadContext, tile: WorkTile) -> Any:
    """Pointer to the ids of the tile's pages."""
    return ctx.block_table.iterator + (
        Int64(tile.row) * ctx.block_table.stride[0] + tile.first_page
    )


@cute.jit
def ask_for_ids(ctx: LoadContext, tile: WorkTile, lane: Int32) -> Int32:
    """The id of the tile's page `lane`; 0 if it has fewer pages."""
    ids = Int32(0)
    if lane < tile.num_pages:
        ids = (page_table(ctx, tile) + lane).load()
    return ids


@cute.jit
def load_pages(
    ctx: LoadContext,
    tile: WorkTile,
    first_ids: Int32,
    depth: Any,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """This warp's pages of the tile into the ring.

    Args:
        first_ids: what `announce` returned.
        depth: pages in flight, in steps of 1 / DEPTH_STEPS; None: as many as there are stages.
    """
    count = tile.num_pages
    table = page_table(ctx, tile)
    ahead = first_ids  # this lane's page id of the next 32
    for block in cutlass.range(0, count, WARP_SIZE, unroll=1):
        ids = ahead
        if block + WARP_SIZE + lane < count:
            ahead = (table + block + WARP_SIZE + lane).load()
        # A warp loads for one warpgroup: pages whose number is its own, modulo the warpgroups.
        first = (ctx.warp - tile.first_number - block) & (plan.consumer_warpgroups - 1)
        stop = cutlass.min(count - block, Int32(WARP_SIZE))
        for i in cutlass.range(first, stop, plan.consumer_warpgroups, unroll=1):
            page = cute.arch.shuffle_sync(ids, i)
            load_page(ctx, page, tile.first_number + block + i, depth, lane, plan)


@cute.jit
def acquire_page(
    ring: RingProducer,
    number: Int32,
    state: PipelineState,
    depth: Any,
    plan: cutlass.Constexpr,
) -> None:
    """Wait until the stage of the CTA's page `number` is free, and no more than `depth` in flight.

    The pages ahead are a whole number. It changes from page to page over DEPTH_STEPS pages, so that
    `depth` is met on average; SPREAD keeps neighbouring pages apart.
    """
    if const_expr(depth is not None):
        step = number // plan.consumer_warpgroups * SPREAD & (DEPTH_STEPS - 1)
        ahead = (depth + step) // DEPTH_STEPS
        nearer = number - plan.consumer_warpgroups * ahead
        if nearer >= 0 and ahead < plan.warp_stages:
            # page_empty, phase of the page `ahead` of the same warpgroup: four warps have read it.
            # Nothing may be written for that; one page less is in flight. The parity is enough, as
            # the next page of that stage is not loaded yet.
            ring.wait_until_read(nearer)
    # page_empty[stage], the phase before: the four warps of its warpgroup have read the page that
    # was here. TMA may overwrite keys and scales, this thread page_valid.
    acquire_reused(ring, state, number)


@cute.jit
def load_page(
    ctx: LoadContext, page: Int32, number: Int32, depth: Any, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """One page into its stage; a page id outside the cache is passed on as invalid, not read."""
    ring = ctx.inputs.page_ring
    state = ring.state(number)
    stage = state.stage
    if lane == 0:
        acquire_page(ring, number, state, depth, plan)
        valid = page >= 0 and page < ctx.num_pages
        ctx.inputs.page_valid[stage] = Int32(1) if valid else Int32(0)
        # page_full[stage]: this arrival releases page_valid, too; the phase of a valid page ends
        # with the last byte of the copy.
        if valid:
            full = ring.expect(stage)
            load_box(
                ctx.inputs.pages + stage * plan.stage_bytes,
                ctx.keys_map,
                [Int32(0), page * PAGE_ROWS],
                full,
                EVICT_FIRST,
            )
        else:
            ring.commit(stage)


PAGES = TileLoader(announce, load_pages, finish)
"""Tiles with pages to score."""
DESCRIPTIONS = TileLoader(describe, None, finish)
"""Tiles of given scores."""
