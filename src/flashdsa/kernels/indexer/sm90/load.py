"""The load warps: announce a work tile and keep its pages in flight."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.tma import EVICT_FIRST, load_box
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.load_tiles import (
    TileLoader,
    acquire_stage,
    announce,
    ask_for_id,
    describe,
    finish,
)
from flashdsa.kernels.indexer.schedule.work_tile import Rows, WorkTile
from flashdsa.kernels.indexer.smem_views import InputBuffers


class LoadContext(NamedTuple):
    """Role load: arrives at page_full and tile_full, waits for page_empty and tile_empty."""

    inputs: InputBuffers  # the producer's end
    keys_map: Any  # pointer to the pages' tensor map; None: no pages
    queries_map: Any  # pointer to the tensor map of the rows' queries; None: likewise
    weights: Any  # (B, H) fp32, device memory
    block_table: Any  # (B / next_n, max_pages) int32, device memory
    num_pages: Int32  # pages of the cache
    rows: Rows
    warp: Int32  # among the role's; the first one announces tiles


@cute.jit
def load_pages(
    ctx: LoadContext,
    tile: WorkTile,
    first_ids: Int32,
    depth: Any,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Load this warp's pages of the tile into the ring.

    Args:
        first_ids: what `announce` returned.
        depth: pages in flight, in steps of 1 / DEPTH_STEPS; None: one for each stage.
    """
    count = tile.num_pages
    ahead = first_ids  # this lane's page id of the next 32 turns
    for block in cutlass.range(0, count, WARP_SIZE, unroll=1):
        ids = ahead
        if block + WARP_SIZE + lane < count:
            ahead = ask_for_id(ctx, tile, block + WARP_SIZE + lane, plan)
        # A warp loads for one warpgroup: pages whose number is its own, modulo the warpgroups.
        first = (ctx.warp - tile.first_number - block) & (plan.consumer_warpgroups - 1)
        stop = cutlass.min(count - block, Int32(WARP_SIZE))
        for i in cutlass.range(first, stop, plan.consumer_warpgroups, unroll=1):
            page = cute.arch.shuffle_sync(ids, i)
            load_page(ctx, page, tile.first_number + block + i, depth, lane, plan)


@cute.jit
def load_page(
    ctx: LoadContext, page: Int32, number: Int32, depth: Any, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """Load one page into its stage; a page id outside the cache is passed on as invalid, not
    read."""
    ring = ctx.inputs.page_ring
    state = ring.state(number)
    stage = state.stage
    if lane == 0:
        acquire_stage(ring, number, state, depth, plan)
        valid = page >= 0 and page < ctx.num_pages
        ctx.inputs.page_valid[stage] = Int32(1) if valid else Int32(0)
        # page_full[stage]: this arrival releases page_valid, too; the phase of a valid page ends
        # with the last byte of the copy.
        if valid:
            # Orders the copy after the consumers' reads, which page_empty ordered before.
            cute.arch.fence_proxy("async.shared", space="cta")
            full = ring.expect(stage)
            load_box(
                ctx.inputs.pages + stage * plan.stage_bytes,
                ctx.keys_map,
                [Int32(0), Int32(0), page],
                full,
                EVICT_FIRST,
            )
        else:
            ring.commit(stage)


PAGES = TileLoader(announce, load_pages, finish)
"""Tiles with pages to score."""
DESCRIPTIONS = TileLoader(describe, None, finish)
"""Tiles of given scores."""
