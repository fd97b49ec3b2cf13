"""The work tiles of a CTA: each row belongs to a group of CTAs, its pages to the group's CTAs.

CTA `part` of `num_parts` gets the row's pages [part * pages / num_parts, (part + 1) * pages /
num_parts), so that a smaller part has the smaller positions. With no more rows than clusters each
row has a cluster of its own. With fewer, a long row gets several neighbouring clusters (see
select/row_splits.py), and parts are numbered on from one to the next. With more, groups get several
rows, forwards and backwards in turns: longest first (see row_schedule.py), or in the order of the
batch where that is too large.
"""

from typing import Any

import cutlass
from cutlass import Int32, Uint32, Uint64, const_expr, cute

from flashdsa.kernels.indexer.schedule.coord import Coord, order_index
from flashdsa.kernels.indexer.schedule.row_schedule import work_of
from flashdsa.kernels.indexer.schedule.work_tile import (
    Rows,
    WorkTile,
    clamped,
    pages_to_score,
    row_length,
    whole_stages,
)
from flashdsa.kernels.indexer.sizes import DEPTH_STEPS
from flashdsa.kernels.indexer.smem_views import SCRATCH_MOST_WORK, SCRATCH_OWN_WORK, SelectBuffers


@cute.jit
def depth_of(
    select: SelectBuffers, rows: Rows, coord: Coord, pages: Int32, plan: cutlass.Constexpr
) -> Any:
    """Pages that a load warp keeps in flight of a row with `pages`, in steps of 1 / DEPTH_STEPS.

    When all SMs ask for more than device memory gives, each gets a share in proportion to what it
    has in flight. Groups with less work than the group with most ask for less, so that all end
    together. None: as many as there are stages for.
    """
    depth = None
    if const_expr(plan.scheduled):
        full = plan.warp_stages * DEPTH_STEPS
        depth = Int32(full)
        if coord.weighed:
            own = work_of(pages, coord, plan)
            if rows.count > coord.num_groups:
                own = select.scratch[SCRATCH_OWN_WORK]
            depth = full * own // select.scratch[SCRATCH_MOST_WORK] + 1
            depth = cutlass.min(cutlass.max(depth, Int32(DEPTH_STEPS)), Int32(full))
    return depth


@cute.jit
def row_of_turn(
    rows: Rows,
    select: SelectBuffers,
    coord: Coord,
    turn: Int32,
    first_length: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """(the row that the caller's group gets in that turn, its length, 0 if there is none)."""
    row, length = order_index(coord, turn), first_length
    if const_expr(plan.scheduled):
        if coord.weighed:
            length = Int32(0)
            if row < rows.count:
                if rows.count > coord.num_groups:
                    row = select.own_rows[turn]
                length = select.lengths[row]
        elif rows.count > coord.num_groups:
            length = row_length(rows, row)
    elif turn > 0:
        length = row_length(rows, row)
    return row, length


def share(part: Int32, num_parts: Int32, pages: Int32) -> tuple[Int32, Int32]:
    """(the part's first page, the page behind its last). A part ends where the next one begins.

    The reciprocal is known before the number of pages is, which keeps the way to a row's first page
    short.
    """
    reciprocal = Uint64(Uint32(0xFFFFFFFF) // Uint32(num_parts)) + 1  # 2**32 for one part
    first = Int32(Uint64(Uint32(part * pages)) * reciprocal >> 32)
    end = Int32(Uint64(Uint32(part * pages + pages)) * reciprocal >> 32)
    return first, end


@cute.jit
def load_scheduled(
    ctx: Any,
    loader: cutlass.Constexpr,
    select: SelectBuffers,
    coord: Coord,
    first_lengths: Int32,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """A load warp: this CTA's part of every row of its group, then the word that no more come.

    Args:
        ctx: has `rows`, and is what the loader takes. loader: a TileLoader.
        first_lengths: lane 0's is the length of the row with the cluster's number, as it is in
            memory; that row is the cluster's first one if rows are not ordered.
    """
    pages_done = Int32(0)
    number = Int32(0)
    groups = coord.num_groups // coord.num_splits
    turns = (ctx.rows.count + groups - 1) // groups
    first_length = clamped(ctx.rows, cute.arch.shuffle_sync(first_lengths, 0))
    for turn in cutlass.range(turns, unroll=1):
        row, length = row_of_turn(ctx.rows, select, coord, turn, first_length, plan)
        pages = pages_to_score(length, plan)
        num_splits = Int32(1)
        if pages >= plan.split_pages:
            num_splits = coord.num_splits
        split = coord.group % coord.num_splits
        if pages > 0 and split < num_splits:
            part = split * coord.num_parts + coord.part
            first, end = share(part, num_splits * coord.num_parts, pages)
            tile = WorkTile(row, first, end - first, length, num_splits, pages_done)
            ids = loader.announce(ctx, number, tile, lane, plan)
            if const_expr(loader.load_pages is not None):
                depth = depth_of(select, ctx.rows, coord, pages, plan)
                loader.load_pages(ctx, tile, ids, depth, lane, plan)
            pages_done += whole_stages(end - first, plan)
            number += 1
    loader.finish(ctx, number, lane, plan)
