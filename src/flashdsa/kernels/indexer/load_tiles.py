"""Load warps of every architecture: the work tiles of a CTA, announced and loaded.

Each row belongs to a group of CTAs, its pages to the group's CTAs. CTA `part` of `num_parts` gets
the row's pages [part * pages / num_parts, (part + 1) * pages / num_parts), so that a smaller part
has the smaller positions. A row that is split has several groups, clusters next to each other, and
parts are numbered on from one to the next (see select/tiles.py). Rows are given out by their
lengths (see schedule/row_schedule.py), or one a group and then in the order of the batch, forwards
and backwards in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64, const_expr, cute

from flashdsa.dsl.memory import Memory
from flashdsa.dsl.pipeline import PipelineState, RingProducer, acquire_reused
from flashdsa.dsl.tma import EVICT_LAST, load_box, load_bytes
from flashdsa.kernels.indexer import sizes, smem_views
from flashdsa.kernels.indexer.schedule import work_tile


class Pages(NamedTuple):
    """Operands of every launch that its kernel gets as they are; see `launch_indexer`."""

    cache: Any  # (num_pages, 64, 1, 132) bytes; num_pages, where TMA alone reads them
    weights: cute.Tensor  # (B, H) fp32
    seq_lens: cute.Tensor  # (B,) int32
    block_table: cute.Tensor  # (B / next_n, max_pages) int32, any distance between rows

    @property
    def num_pages(self) -> Any:
        return self.cache.shape[0] if hasattr(self.cache, "shape") else self.cache


class LoadContext(NamedTuple):
    """Role load: arrives at page_full and tile_full, waits for page_empty and tile_empty."""

    inputs: smem_views.InputBuffers  # the producer's end
    memory: Memory
    keys_map: Any  # pointer to the pages' tensor map
    queries_map: Any  # pointer to the tensor map of the rows' queries
    pages: Pages
    rows: work_tile.Rows
    warp: Int32  # among the role's; the first one announces tiles


def loading(
    memory: Memory,
    maps: tuple[Any, Any],
    pages: Pages,
    rows: work_tile.Rows,
    warp: Int32,
    plan: Any,
) -> LoadContext:
    """The context of a load warp. `maps`: of keys and of queries. `warp`: of the CTA."""
    inputs = smem_views.input_buffers_in(memory, plan, RingProducer)
    keys, queries = maps
    own = warp - plan.consumer_warps
    return LoadContext(inputs, memory, keys.get_ptr(), queries.get_ptr(), pages, rows, own)


@dataclass(frozen=True)
class TileLoader:
    """Functions of a load warp, all of whose lanes call; the first argument is its context.

    Attributes:
        announce: (context, number, tile, lane, plan) describes the CTA's tile `number` to the
            consumers; returns this lane's page id of the tile's first pages.
        load_pages: (context, tile, page ids, depth, lane, plan) loads them.
        finish: (context, number, lane, plan) says that no tile comes any more.
    """

    announce: Callable[..., Any]
    load_pages: Callable[..., None]
    finish: Callable[..., None]


@cute.jit
def row_of_turn(
    rows: work_tile.Rows,
    select: smem_views.SelectBuffers,
    coord: work_tile.Coord,
    turn: Int32,
    first_length: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """(the row that the caller's group gets in that turn, its length, 0 if it gets none)."""
    if const_expr(plan.splits):
        row, length = work_tile.index_of_turn(coord.group, coord.num_groups, turn), Int32(0)
        if coord.ordered:
            row = select.own_rows[turn]
        if coord.together == 1:
            if row < rows.count:
                length = select.lengths[row]
        else:
            length = work_tile.row_length(rows, row)
    else:
        row, length = work_tile.index_of_turn(coord.group, coord.num_groups, turn), first_length
        if turn > 0:
            length = work_tile.row_length(rows, row)
    return row, length


class Share(NamedTuple):
    """The part of its rows that a CTA gets."""

    part: Int32
    num_parts: Int32
    num_splits: Int32  # clusters that share the row


@cute.jit
def share_of_row(coord: work_tile.Coord, plan: cutlass.Constexpr) -> Share:
    """The caller's share; a part from `num_parts` on is empty."""
    part, num_parts = coord.part, coord.num_parts
    if const_expr(plan.splits):
        if coord.num_splits > 1:
            part += coord.group * num_parts
            num_parts *= coord.num_splits
    return Share(part, num_parts, coord.num_splits)


@cute.jit
def pages_of_share(share: Share, pages: Int32, plan: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """(the part's first page, one past its last). A part ends where the next one begins."""
    if const_expr(plan.splits):
        inverse = cute.arch.rcp_approx(Float32(share.num_parts))
        first = work_tile.divide(share.part * pages, share.num_parts, inverse)
        return first, work_tile.divide(share.part * pages + pages, share.num_parts, inverse)
    # The reciprocal is known before the number of pages is, which keeps the way to a row's first
    # page short.
    reciprocal = Uint64(Uint32(0xFFFFFFFF) // Uint32(share.num_parts)) + 1  # 2**32 for one part
    first = Int32(Uint64(Uint32(share.part * pages)) * reciprocal >> 32)
    end = Int32(Uint64(Uint32(share.part * pages + pages)) * reciprocal >> 32)
    return first, end


@cute.jit
def load_scheduled(
    ctx: LoadContext,
    loader: cutlass.Constexpr,
    select: smem_views.SelectBuffers,
    coord: work_tile.Coord,
    first_lengths: Int32,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """A load warp: load this CTA's part of every row of its group, then announce that no more come.
    loader: a TileLoader. first_lengths: lane 0's is
    the length of the row with the cluster's number, as it is in memory; that row is the cluster's
    first one if lengths do not decide."""
    pages_done = Int32(0)
    number = Int32(0)
    turns = coord.turns
    if const_expr(not plan.splits):
        turns = (ctx.rows.count + coord.num_groups - 1) // coord.num_groups
    first_length = work_tile.clamped(ctx.rows, cute.arch.shuffle_sync(first_lengths, 0))
    for turn in cutlass.range(turns, unroll=1):
        row, length = row_of_turn(ctx.rows, select, coord, turn, first_length, plan)
        pages = work_tile.pages_to_score(ctx.rows, length)
        share = share_of_row(coord, plan)
        if pages > 0 and share.part < share.num_parts:
            first, end = pages_of_share(share, pages, plan)
            tile = work_tile.WorkTile(row, first, end - first, length, share.num_splits, pages_done)
            ids = loader.announce(ctx, number, tile, lane, plan)
            loader.load_pages(ctx, tile, ids, coord.depth, lane, plan)
            pages_done += work_tile.whole_stages(end - first, plan)
            number += 1
    loader.finish(ctx, number, lane, plan)


SPREAD = 5
"""Factor whose multiples modulo DEPTH_STEPS are all steps, and neighbouring ones are far apart."""


@cute.jit
def announce(
    ctx: LoadContext, number: Int32, tile: work_tile.WorkTile, lane: Int32, plan: cutlass.Constexpr
) -> Int32:
    """Announce a tile: description, queries and weights; return the id of the page that is scored
    in the turn `lane`."""
    ids = ask_for_id(ctx, tile, lane, plan)  # on their way while the tile is announced
    describe(ctx, number, tile, lane, plan)
    return ids


@cute.jit
def describe(
    ctx: LoadContext, number: Int32, tile: work_tile.WorkTile, lane: Int32, plan: cutlass.Constexpr
) -> None:
    """The first warp: load a tile's description, and its row's queries and weights."""
    if ctx.warp == 0:
        ring = ctx.inputs.tile_ring
        state = ring.state(number)
        # tile_empty[stage], the phase before: every consumer warp has left the previous tile of the
        # stage. Description, queries and weights of the stage may be overwritten.
        acquire_reused(ring, state, number)
        if lane == 0:
            work_tile.write_tile(ctx.inputs.tiles, state.stage, tile)
            # tile_full[stage]: this thread's arrival releases its description, too; the phase ends
            # with the last byte of the copies.
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
            nothing = work_tile.WorkTile(
                Int32(-1), *(Int32(0) for _ in work_tile.WorkTile._fields[1:])
            )
            work_tile.write_tile(ctx.inputs.tiles, state.stage, nothing)
            ring.commit(state.stage)
    cute.arch.sync_warp()


@cute.jit
def load_query(ctx: LoadContext, stage: Int32, row: Int32, plan: cutlass.Constexpr) -> None:
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
        ctx.pages.weights.iterator + Int64(row) * plan.tile_heads,
        plan.weight_bytes,
        full,
    )


def page_table(ctx: LoadContext, tile: work_tile.WorkTile) -> Any:
    """Pointer to the ids of the tile's pages."""
    table = ctx.pages.block_table
    return table.iterator + (
        Int64(work_tile.request_of(ctx.rows, tile.row)) * table.stride[0] + tile.first_page
    )


@cute.jit
def ask_for_id(
    ctx: LoadContext, tile: work_tile.WorkTile, turn: Int32, plan: cutlass.Constexpr
) -> Int32:
    """The id of the tile's page that is scored in that turn; 0 if it has fewer pages."""
    page = Int32(0)
    if turn < tile.num_pages:
        page = (page_table(ctx, tile) + work_tile.page_in_turn(turn, tile.num_pages, plan)).load()
    return page


@cute.jit
def acquire_stage(
    ring: RingProducer, number: Int32, state: PipelineState, depth: Any, plan: cutlass.Constexpr
) -> None:
    """Wait until the stage of use `number` is free, and no more than `depth` stages of the calling
    warp are in flight. The number of stages in flight is an integer. It varies over DEPTH_STEPS
    uses, so that its average is `depth`; SPREAD keeps neighbouring uses apart."""
    if const_expr(depth is not None):
        step = number // plan.load_warps * SPREAD & (sizes.DEPTH_STEPS - 1)
        ahead = (depth + step) // sizes.DEPTH_STEPS
        nearer = number - plan.load_warps * ahead
        if nearer >= 0 and ahead < plan.warp_stages:
            # page_empty, phase of the use `ahead` of the same load warp: four warps have read it.
            # Nothing may be written because of that; one stage less is in flight. The parity is
            # enough, as this warp has not filled that stage again.
            ring.wait_until_read(nearer)
    # page_empty[stage], the phase before: the four warps of its warpgroup have read the stage's
    # previous page. TMA may overwrite keys and scales, this thread page_valid.
    acquire_reused(ring, state, number)
