"""How rows are dealt to groups of CTAs: a row belongs to one group, its pages to the group's CTAs.

CTA `part` of `parts` gets the row's pages [part * pages / parts, (part + 1) * pages / parts), so
that a smaller part has the smaller positions. With no more rows than clusters each has its own.
With fewer, a long row gets several neighbouring clusters (see teams.py), and parts are numbered on
from one to the next. With more, groups get several rows, forwards and backwards in turns: longest
first (see order.py), or in the order of the batch where it is too large for that.
"""

from typing import Any

import cutlass
from cutlass import Int32, Uint32, Uint64, const_expr, cute

from flashdsa.kernels.indexer.sm90.load import Producer, announce, ask_for_ids, finish, load_pages
from flashdsa.kernels.indexer.sm90.memory import SCRATCH_MOST_WORK, SCRATCH_OWN_WORK, Ranking
from flashdsa.kernels.indexer.sm90.order import work_of
from flashdsa.kernels.indexer.sm90.place import Place, number_in
from flashdsa.kernels.indexer.sm90.plan import DEPTH_STEPS
from flashdsa.kernels.indexer.sm90.segments import (
    Rows,
    Segment,
    clamped,
    pages_to_score,
    row_length,
)


@cute.jit
def depth_of(
    ranking: Ranking, rows: Rows, place: Place, pages: Int32, plan: cutlass.Constexpr
) -> Any:
    """Pages that a producer warp keeps in flight, as in `load_pages`, of a row with so many.

    Where all SMs ask for more than device memory gives, each gets a share like what it has in
    flight. So groups with less work than the one with most ask for less, and all end together.
    """
    depth = None
    if const_expr(plan.dealt):
        full = plan.warp_stages * DEPTH_STEPS
        depth = Int32(full)
        if place.weighed:
            own = work_of(pages, place, plan)
            if rows.count > place.groups:
                own = ranking.scratch[SCRATCH_OWN_WORK]
            depth = full * own // ranking.scratch[SCRATCH_MOST_WORK] + 1
            depth = cutlass.min(cutlass.max(depth, Int32(DEPTH_STEPS)), Int32(full))
    return depth


@cute.jit
def row_of_turn(
    c: Producer,
    ranking: Ranking,
    place: Place,
    turn: Int32,
    first_length: Int32,
    plan: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """(the row that the caller's group gets in that turn, its length, 0 if there is none)."""
    row, length = number_in(place, turn), first_length
    if const_expr(plan.dealt):
        if place.weighed:
            length = Int32(0)
            if row < c.rows.count:
                if c.rows.count > place.groups:
                    row = ranking.own_rows[turn]
                length = ranking.lengths[row]
        elif c.rows.count > place.groups:
            length = row_length(c.rows, row)
    elif turn > 0:
        length = row_length(c.rows, row)
    return row, length


def share(part: Int32, parts: Int32, pages: Int32) -> tuple[Int32, Int32]:
    """(the part's first page, that behind its last). A part ends where the next one begins.

    By a reciprocal that is known before the pages are: the way to a row's first page is short.
    """
    reciprocal = Uint64(Uint32(0xFFFFFFFF) // Uint32(parts)) + 1  # 2**32 for one part
    first = Int32(Uint64(Uint32(part * pages)) * reciprocal >> 32)
    end = Int32(Uint64(Uint32(part * pages + pages)) * reciprocal >> 32)
    return first, end


@cute.jit
def produce_dealt(
    c: Producer,
    ranking: Ranking,
    place: Place,
    first_lengths: Int32,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Load this CTA's part of every row of its group, then say that there are no more.

    Lane 0's of `first_lengths` is that of the row with the cluster's number, as it is in memory;
    that row is the cluster's first one if rows are not ordered.
    """
    pages_done = Int32(0)
    segment = Int32(0)
    groups = place.groups // place.teams
    turns = (c.rows.count + groups - 1) // groups
    first_length = clamped(c.rows, cute.arch.shuffle_sync(first_lengths, 0))
    for turn in cutlass.range(turns, unroll=1):
        row, length = row_of_turn(c, ranking, place, turn, first_length, plan)
        pages = pages_to_score(length, plan)
        teams = Int32(1)
        if pages >= plan.team_pages:
            teams = place.teams
        team = place.group % place.teams
        if pages > 0 and team < teams:
            part = team * place.parts + place.part
            first, end = share(part, teams * place.parts, pages)
            described = Segment(row, first, end - first, length, teams, pages_done)
            if const_expr(c.keys_map is None):
                announce(c, segment, described, lane, plan)
            else:
                ids = ask_for_ids(c, described, lane)  # on their way while the row is announced
                announce(c, segment, described, lane, plan)
                depth = depth_of(ranking, c.rows, place, pages, plan)
                load_pages(c, described, ids, depth, lane, plan)
            pages_done += end - first
            segment += 1
    finish(c, segment, lane, plan)
