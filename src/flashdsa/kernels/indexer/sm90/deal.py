"""How rows are dealt to clusters: a row belongs to one cluster, its pages to the cluster's CTAs.

CTA `part` of `parts` gets the row's pages [part * pages / parts, (part + 1) * pages / parts), so
that a smaller part has the smaller positions. With no more rows than clusters each has its own.
With fewer, a long row gets several neighbouring clusters (see teams.py), and parts are numbered on
from one to the next. Batches of up to ORDERED_ROWS rows are dealt longest first, forwards and
backwards in turns, which evens out the sums; larger ones in the same turns but in the order of the
batch.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, const_expr, cute

from flashdsa.kernels.indexer.sm90.listing import consumer_sync, four_at
from flashdsa.kernels.indexer.sm90.load import Producer, announce, finish, load_pages
from flashdsa.kernels.indexer.sm90.memory import Ranking
from flashdsa.kernels.indexer.sm90.plan import MAX_DEALS, ORDERED_ROWS
from flashdsa.kernels.indexer.sm90.segments import (
    Rows,
    Segment,
    clamped,
    pages_to_score,
    row_length,
)

VECTOR = 4
"""Rows that are compared with one load."""


class Place(NamedTuple):
    """Where a CTA is in the grid."""

    cluster: Int32
    clusters: Int32
    part: Int32  # this CTA's rank in its cluster
    parts: Int32  # CTAs of a cluster
    teams: Int32  # neighbouring clusters that share rows that are long enough


def find_place(teams: Int32) -> Place:
    """Of the calling CTA; `teams` divides the number of clusters."""
    cluster, _, _ = cute.arch.cluster_idx()
    clusters, _, _ = cute.arch.cluster_dim()
    parts = cute.arch.cluster_size()
    return Place(cluster, clusters, cute.arch.block_idx_in_cluster(), parts, teams)


@cute.jit
def is_ordered(rows: Rows, place: Place) -> cutlass.Boolean:
    """Whether rows are dealt longest first: where clusters get several, and not too many."""
    return (
        rows.count > place.clusters
        and rows.count <= ORDERED_ROWS
        and rows.count <= MAX_DEALS * place.clusters
    )


@cute.jit
def cluster_of(place: Place, number: Int32) -> Int32:
    """The cluster that gets row `number` of the order."""
    turn = number // place.clusters
    cluster = number - turn * place.clusters
    return place.clusters - 1 - cluster if turn & 1 == 1 else cluster


@cute.jit
def order_rows(
    ranking: Ranking, rows: Rows, place: Place, thread: Int32, plan: cutlass.Constexpr
) -> None:
    """Consumers: the cluster's rows, longest first, into `own_rows`; the caller syncs.

    Every CTA finds the same order: by pages, then by row. It uses the histogram's memory: pages of
    each row, then the number of rows before each.
    """
    pages_of = ranking.histogram
    assert const_expr(plan.consumer_threads >= ORDERED_ROWS)
    pages = Int32(-1)
    if thread < rows.count:
        pages = pages_to_score(row_length(rows, thread), plan)
    pages_of[thread] = pages
    consumer_sync(plan)
    if thread < rows.count:
        before = Int32(0)
        # Rows beyond the last one have -1 pages and come before nobody.
        for four in cutlass.range((rows.count + VECTOR - 1) // VECTOR, unroll=2):
            others = four_at(pages_of, four)
            for i in cutlass.range_constexpr(VECTOR):
                if others[i] > pages or (others[i] == pages and VECTOR * four + i < thread):
                    before += 1
        if cluster_of(place, before) == place.cluster:
            ranking.own_rows[before // place.clusters] = thread
    consumer_sync(plan)


@cute.jit
def produce_dealt(
    c: Producer,
    own_rows: cute.Tensor,
    place: Place,
    first_lengths: Int32,
    lane: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Load this CTA's part of every row of its cluster, then say that there are no more.

    Lane 0's of `first_lengths` is that of the row with the cluster's number, as it is in memory;
    that row is the cluster's first one if rows are not ordered.
    """
    pages_done = Int32(0)
    segment = Int32(0)
    clusters = place.clusters // place.teams
    cluster = place.cluster // place.teams
    turns = (c.rows.count + clusters - 1) // clusters
    ordered = is_ordered(c.rows, place)
    first_length = clamped(c.rows, cute.arch.shuffle_sync(first_lengths, 0))
    for turn in cutlass.range(turns, unroll=1):
        number = turn * clusters + cluster
        if turn & 1 == 1:
            number = (turn + 1) * clusters - 1 - cluster
        row = number
        if ordered and number < c.rows.count:
            row = own_rows[turn]
        length = first_length
        if turn > 0 or ordered:
            length = row_length(c.rows, row)
        pages = pages_to_score(length, plan)
        teams = Int32(1)
        if pages >= plan.team_pages:
            teams = place.teams
        team = place.cluster - cluster * place.teams
        if pages > 0 and team < teams:
            part = team * place.parts + place.part
            first = part * pages // (teams * place.parts)
            end = (part + 1) * pages // (teams * place.parts)
            described = Segment(row, first, end - first, length, teams, pages_done)
            announce(c, segment, described, lane, plan)
            if const_expr(c.keys_map is not None):
                load_pages(c, described, lane, plan)
            pages_done += end - first
            segment += 1
    finish(c, segment, lane, plan)
