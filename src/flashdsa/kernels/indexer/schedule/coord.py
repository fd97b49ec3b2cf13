"""Where a CTA is: groups of CTAs share rows, and a group is a cluster or an equal part of one."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, const_expr, cute

from flashdsa.kernels.indexer.schedule.work_tile import Rows
from flashdsa.kernels.indexer.sizes import MAX_HALVINGS, MAX_OWN_ROWS, ORDERED_ROWS


class Coord(NamedTuple):
    """Where a CTA is among the groups of CTAs that share rows."""

    group: Int32
    num_groups: Int32
    first_rank: Int32  # the rank in its cluster of the group's first CTA
    part: Int32  # this CTA's rank in its group
    num_parts: Int32  # CTAs of a group
    num_splits: Int32  # neighbouring groups that share rows that are long enough
    weighed: Any  # Boolean: the rows' lengths decide who gets which; None: they never do


@cute.jit
def find_coord(rows: Rows, num_splits: Int32, plan: cutlass.Constexpr) -> Coord:
    """The calling CTA's coordinates if groups are clusters; `num_splits` divides their number."""
    cluster, _, _ = cute.arch.cluster_idx()
    clusters, _, _ = cute.arch.cluster_dim()
    num_parts = cute.arch.cluster_size()
    part = cute.arch.block_idx_in_cluster()
    weighed = None
    if const_expr(plan.scheduled):
        several = rows.count > clusters
        weighed = several and rows.count <= ORDERED_ROWS and rows.count <= MAX_OWN_ROWS * clusters
    return Coord(cluster, clusters, Int32(0), part, num_parts, num_splits, weighed)


def most_halvings(coord: Coord) -> Int32:
    """How often clusters can be halved, at most MAX_HALVINGS times."""
    size = coord.num_parts | (1 << MAX_HALVINGS)
    return Int32(cute.arch.popc((size & -size) - 1))


@cute.jit
def split(coord: Coord, halvings: Int32) -> Coord:
    """The caller's coordinates if each cluster is halved that often."""
    num_parts = coord.num_parts >> halvings
    number = Int32(0)  # of the group in its cluster
    for before in cutlass.range_constexpr(1, 1 << MAX_HALVINGS):
        if coord.part >= before * num_parts:
            number += 1
    return coord._replace(
        group=(coord.group << halvings) + number,
        num_groups=coord.num_groups << halvings,
        first_rank=number * num_parts,
        part=coord.part - number * num_parts,
        num_parts=num_parts,
    )


def order_index(coord: Coord, turn: Int32) -> Int32:
    """Which row of the order the caller's group gets in a turn: odd turns go backwards."""
    groups = coord.num_groups // coord.num_splits
    group = coord.group // coord.num_splits
    backwards = -(turn & 1)
    return turn * groups + (group ^ backwards) + (groups & backwards)


@cute.jit
def group_of_row(coord: Coord, index: Int32) -> tuple[Int32, Int32]:
    """The inverse of `order_index`: (the group that gets row `index` of the order, its turn)."""
    turn = index // coord.num_groups
    group = index - turn * coord.num_groups
    if turn & 1 == 1:
        group = coord.num_groups - 1 - group
    return group, turn
