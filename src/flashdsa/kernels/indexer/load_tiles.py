"""Load warps of every architecture: they announce work tiles and limit the pages in flight.

The first argument is the context of an architecture's role load. Its fields: `inputs`, the
producer's end of InputBuffers; `queries_map`, a pointer to a tensor map, None: no pages follow;
`weights` and `block_table`, in device memory; `warp`, the calling one among the role's.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from flashdsa.dsl.pipeline import PipelineState, RingProducer, acquire_reused
from flashdsa.dsl.tma import EVICT_LAST, load_box, load_bytes
from flashdsa.kernels.indexer.schedule.work_tile import WorkTile, request_of, write_tile
from flashdsa.kernels.indexer.sizes import DEPTH_STEPS

SPREAD = 5
"""Factor whose multiples modulo DEPTH_STEPS are all steps, and neighbouring ones are far apart."""


@cute.jit
def announce(
    ctx: Any, number: Int32, tile: WorkTile, lane: Int32, plan: cutlass.Constexpr
) -> Int32:
    """Announce a tile: description, queries and weights; return the id of its page `lane`."""
    ids = ask_for_ids(ctx, tile, lane)  # on their way while the tile is announced
    describe(ctx, number, tile, lane, plan)
    return ids


@cute.jit
def describe(ctx: Any, number: Int32, tile: WorkTile, lane: Int32, plan: cutlass.Constexpr) -> None:
    """The first warp: load a tile's description, and its row's queries and weights if pages
    follow."""
    if ctx.warp == 0:
        ring = ctx.inputs.tile_ring
        state = ring.state(number)
        # tile_empty[stage], the phase before: every consumer warp has left the previous tile of the
        # stage. Description, queries and weights of the stage may be overwritten.
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
def finish(ctx: Any, number: Int32, lane: Int32, plan: cutlass.Constexpr) -> None:
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
def load_query(ctx: Any, stage: Int32, row: Int32, plan: cutlass.Constexpr) -> None:
    """Arrive at tile_full and start the copies of the row's queries and weights."""
    full = ctx.inputs.tile_ring.expect(stage)
    load_box(
        ctx.inputs.queries + stage * plan.query_bytes,
        ctx.queries_map,
        [Int32(0), row * plan.tile_heads],
        full,
        EVICT_LAST,
    )
    load_bytes(
        ctx.inputs.weights.iterator + stage * plan.tile_heads,
        ctx.weights.iterator + Int64(row) * plan.tile_heads,
        plan.weight_bytes,
        full,
    )


def page_table(ctx: Any, tile: WorkTile) -> Any:
    """Pointer to the ids of the tile's pages."""
    return ctx.block_table.iterator + (
        Int64(request_of(ctx.rows, tile.row)) * ctx.block_table.stride[0] + tile.first_page
    )


@cute.jit
def ask_for_ids(ctx: Any, tile: WorkTile, lane: Int32) -> Int32:
    """The id of the tile's page `lane`; 0 if it has fewer pages."""
    ids = Int32(0)
    if lane < tile.num_pages:
        ids = (page_table(ctx, tile) + lane).load()
    return ids


@cute.jit
def acquire_stage(
    ring: RingProducer,
    number: Int32,
    state: PipelineState,
    depth: Any,
    plan: cutlass.Constexpr,
) -> None:
    """Wait until the stage of use `number` is free, and no more than `depth` stages of the calling
    warp are in flight.

    The number of stages in flight is an integer. It varies over DEPTH_STEPS uses, so that its
    average is `depth`; SPREAD keeps neighbouring uses apart.
    """
    if const_expr(depth is not None):
        step = number // plan.load_warps * SPREAD & (DEPTH_STEPS - 1)
        ahead = (depth + step) // DEPTH_STEPS
        nearer = number - plan.load_warps * ahead
        if nearer >= 0 and ahead < plan.warp_stages:
            # page_empty, phase of the use `ahead` of the same load warp: four warps have read it.
            # Nothing may be written because of that; one stage less is in flight. The parity is
            # enough, as this warp has not filled that stage again.
            ring.wait_until_read(nearer)
    # page_empty[stage], the phase before: the four warps of its warpgroup have read the stage's
    # previous page. TMA may overwrite keys and scales, this thread page_valid.
    acquire_reused(ring, state, number)
