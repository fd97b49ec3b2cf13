"""The load warps: keep the pages of work tiles in flight, a stage of several pages at a time."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.tma import EVICT_FIRST, load_box, load_bytes
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.load_tiles import (
    TileLoader,
    acquire_stage,
    announce,
    finish,
    page_table,
)
from flashdsa.kernels.indexer.schedule.work_tile import Rows, WorkTile
from flashdsa.kernels.indexer.sm100.plan import SCALE_BYTES
from flashdsa.kernels.indexer.smem_views import InputBuffers
from flashdsa.problem import PAGE_KEY_BYTES


class LoadContext(NamedTuple):
    """Role load: arrives at page_full and tile_full, waits for page_empty and tile_empty."""

    inputs: InputBuffers  # the producer's end
    scales: Any  # pointer to shared memory, page p of stage s at + (s * pages_per_stage + p) * 256
    keys_map: Any  # pointer to the pages' tensor map, boxes of a page's keys
    queries_map: Any  # pointer to the tensor map of the rows' queries
    cache: Any  # (num_pages, 64, 1, 132) bytes, device memory, any distance between pages
    weights: Any  # (B, H) fp32, device memory
    block_table: Any  # (B / next_n, max_pages) int32, device memory
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
    """Load this warp's stages of the tile into the ring.

    Args:
        first_ids: what `announce` returned.
        depth: stages in flight, in steps of 1 / DEPTH_STEPS; None: all stages.
    """
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
    ring, num_pages = ctx.inputs.page_ring, ctx.cache.shape[0]
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
                ctx.scales + slot * SCALE_BYTES,
                ctx.cache.iterator + (Int64(scale_page) * ctx.cache.stride[0] + PAGE_KEY_BYTES),
                SCALE_BYTES,
                full,
            )


PAGES = TileLoader(announce, load_pages, finish)
"""Tiles with pages to score."""
