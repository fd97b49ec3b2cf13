"""The work tiles of a CTA: each row belongs to a group of CTAs, its pages to the group's CTAs.

CTA `part` of `num_parts` gets the row's pages [part * pages / num_parts, (part + 1) * pages /
num_parts), so that a smaller part has the smaller positions. A row that is split has several
groups, next to each other, and parts are numbered on from one to the next: clusters where a batch
is small (see select/row_splits.py), CTAs where the lengths decide (see select/cta_splits.py). Rows
are given out by their lengths (see row_schedule.py), or one a group and then in the order of the
batch, forwards and backwards in turns.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, Uint64, const_expr, cute

from flashdsa.kernels.indexer.schedule.coord import Coord, index_of_turn
from flashdsa.kernels.indexer.schedule.page_partition import divide
from flashdsa.kernels.indexer.schedule.work_tile import (
    Rows,
    WorkTile,
    clamped,
    pages_to_score,
    row_length,
    whole_stages,
)
from flashdsa.kernels.indexer.smem_views import SelectBuffers


@cute.jit
def row_of_turn(
    rows: Rows,
    select: SelectBuffers,
    coord: Coord,
    turn: Int32,
    first_length: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """(the row that the caller's group gets in that turn, its length, 0 if it gets none)."""
    if const_expr(plan.scheduled):
        row, length = index_of_turn(coord.group, coord.num_groups, turn), Int32(0)
        if coord.ordered:
            row = select.own_rows[turn]
        if coord.weighed:
            if row < rows.count:
                length = select.lengths[row]
        else:
            length = row_length(rows, row)
    else:
        groups = coord.num_groups // coord.num_splits
        row = index_of_turn(coord.group // coord.num_splits, groups, turn)
        length = first_length
        if turn > 0:
            length = row_length(rows, row)
    return row, length


class Share(NamedTuple):
    """The part of its rows that a CTA gets."""

    part: Int32
    num_parts: Int32
    num_splits: Int32  # groups that share the row


@cute.jit
def share_of_row(coord: Coord, pages: Int32, plan: cutlass.Constexpr) -> Share:
    """The caller's share; a part from `num_parts` on is empty."""
    if const_expr(plan.scheduled):
        # Groups that share a row have one CTA.
        part, num_parts = coord.part, coord.num_parts
        if coord.num_splits > 1:
            part, num_parts = coord.group, coord.num_splits
        return Share(part, num_parts, coord.num_splits)
    num_splits = Int32(1)
    if pages >= plan.split_pages:
        num_splits = coord.num_splits
    split = coord.group % coord.num_splits
    return Share(split * coord.num_parts + coord.part, num_splits * coord.num_parts, num_splits)


@cute.jit
def pages_of_share(share: Share, pages: Int32, plan: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """(the part's first page, one past its last). A part ends where the next one begins."""
    if const_expr(plan.scheduled):
        inverse = cute.arch.rcp_approx(Float32(share.num_parts))
        first = divide(share.part * pages, share.num_parts, inverse)
        return first, divide(share.part * pages + pages, share.num_parts, inverse)
    # The reciprocal is known before the number of pages is, which keeps the way to a row's first
    # page short.
    reciprocal = Uint64(Uint32(0xFFFFFFFF) // Uint32(share.num_parts)) + 1  # 2**32 for one part
    first = Int32(Uint64(Uint32(share.part * pages)) * reciprocal >> 32)
    end = Int32(Uint64(Uint32(share.part * pages + pages)) * reciprocal >> 32)
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
    """A load warp: load this CTA's part of every row of its group, then announce that no more come.

    Args:
        ctx: has `rows`, and is what the loader takes. loader: a TileLoader.
        first_lengths: lane 0's is the length of the row with the cluster's number, as it is in
            memory; that row is the cluster's first one if lengths do not decide.
    """
    pages_done = Int32(0)
    number = Int32(0)
    turns = coord.turns
    if const_expr(not plan.scheduled):
        groups = coord.num_groups // coord.num_splits
        turns = (ctx.rows.count + groups - 1) // groups
    first_length = clamped(ctx.rows, cute.arch.shuffle_sync(first_lengths, 0))
    for turn in cutlass.range(turns, unroll=1):
        row, length = row_of_turn(ctx.rows, select, coord, turn, first_length, plan)
        pages = pages_to_score(length, plan)
        share = share_of_row(coord, pages, plan)
        if pages > 0 and share.part < share.num_parts:
            first, end = pages_of_share(share, pages, plan)
            tile = WorkTile(row, first, end - first, length, share.num_splits, pages_done)
            ids = loader.announce(ctx, number, tile, lane, plan)
            if const_expr(loader.load_pages is not None):
                loader.load_pages(ctx, tile, ids, coord.depth, lane, plan)
            pages_done += whole_stages(end - first, plan)
            number += 1
    loader.finish(ctx, number, lane, plan)
