"""Clusters dealt to a few rows by their lengths, in the registers of a warp: no thread waits for
another, as one does where rows are given out by row_schedule.py.

A row of `split_pages` or more is *long*. Every other row that is scored gets a cluster, and the
long ones get the rest, about as many as their lengths ask for.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.dsl.warp import lowest_bit
from flashdsa.kernels.indexer.schedule.coord import Coord
from flashdsa.kernels.indexer.schedule.work_tile import Rows, clamped, pages_to_score
from flashdsa.kernels.indexer.sizes import MOST_DEALT

ROUNDING = 1 / 64
"""More than the error of a long row's share of the clusters, in clusters, and so little that no
cluster is dealt twice: all such rows together get less than one more."""


class Dealt(NamedTuple):
    """A cluster's row."""

    coord: Coord  # `group` is the cluster's number among those of the row, `num_splits` theirs
    length: Int32  # of the row; 0: the cluster has none


@cute.jit
def deal_clusters(
    rows: Rows, coord: Coord, lengths: Int32, lane: Int32, plan: cutlass.Constexpr
) -> Dealt:
    """A warp: return the caller's row and its cluster's place in it.

    Args:
        rows: at most MOST_DEALT, and no more than clusters.
        coord: `num_splits` is the most that a row may get.
        lengths: of the lane's row, as it is in memory.
    """
    length = clamped(rows, lengths)
    pages = pages_to_score(length, plan)
    is_long = pages >= plan.sharing.split_pages
    long = cute.arch.vote_ballot_sync(is_long)
    short = cute.arch.vote_ballot_sync(pages > 0 and not is_long)
    long_pages = cute.arch.warp_redux_sync(pages if is_long else Int32(0), "add")
    num_long, num_short = Int32(cute.arch.popc(long)), Int32(cute.arch.popc(short))
    # Every long row gets one, and a share of the others.
    more = coord.num_groups - num_short - num_long
    share = Float32(more) * Float32(pages) * cute.arch.rcp_approx(Float32(long_pages))
    clusters = cutlass.min(Int32(share + Float32(ROUNDING)) + 1, coord.num_splits)
    clusters = clusters if is_long else Int32(pages > 0)
    end = clusters
    for shift in cutlass.range_constexpr(MOST_DEALT.bit_length() - 1):
        before = cute.arch.shuffle_sync_up(end, 1 << shift, mask_and_clamp=0)
        end += before if lane >= 1 << shift else Int32(0)
    first = end - clusters
    owner = cute.arch.vote_ballot_sync(first <= coord.group and coord.group < end)
    at = lowest_bit(owner)
    of_row = coord._replace(
        group=coord.group - cute.arch.shuffle_sync(first, at),
        num_splits=cute.arch.shuffle_sync(clusters, at),
        row=at,
    )
    length = cute.arch.shuffle_sync(length, at)
    return Dealt(of_row, length if owner != 0 else Int32(0))
