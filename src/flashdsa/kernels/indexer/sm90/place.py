"""Where a CTA is: groups of CTAs share rows, and a group is a cluster or an equal part of one."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, const_expr, cute

from flashdsa.kernels.indexer.sm90.plan import MAX_DEALS, MAX_HALVINGS, ORDERED_ROWS
from flashdsa.kernels.indexer.sm90.segments import Rows


class Place(NamedTuple):
    """Where a CTA is among the groups of CTAs that share rows."""

    group: Int32
    groups: Int32
    first: Int32  # the rank in its cluster of the group's first CTA
    part: Int32  # this CTA's rank in its group
    parts: Int32  # CTAs of a group
    teams: Int32  # neighbouring groups that share rows that are long enough
    weighed: Any  # Boolean: the rows' lengths decide who gets which; None: they never do


@cute.jit
def find_place(rows: Rows, teams: Int32, plan: cutlass.Constexpr) -> Place:
    """Of the calling CTA if groups are clusters; `teams` divides their number."""
    cluster, _, _ = cute.arch.cluster_idx()
    clusters, _, _ = cute.arch.cluster_dim()
    parts = cute.arch.cluster_size()
    part = cute.arch.block_idx_in_cluster()
    weighed = None
    if const_expr(plan.dealt):
        several = rows.count > clusters
        weighed = several and rows.count <= ORDERED_ROWS and rows.count <= MAX_DEALS * clusters
    return Place(cluster, clusters, Int32(0), part, parts, teams, weighed)


def most_halvings(place: Place) -> Int32:
    """How often clusters can be halved, at most MAX_HALVINGS times."""
    size = place.parts | (1 << MAX_HALVINGS)
    return Int32(cute.arch.popc((size & -size) - 1))


@cute.jit
def split(place: Place, halvings: Int32) -> Place:
    """The caller's place if each cluster is halved so often."""
    parts = place.parts >> halvings
    number = Int32(0)  # of the group in its cluster
    for before in cutlass.range_constexpr(1, 1 << MAX_HALVINGS):
        if place.part >= before * parts:
            number += 1
    return place._replace(
        group=(place.group << halvings) + number,
        groups=place.groups << halvings,
        first=number * parts,
        part=place.part - number * parts,
        parts=parts,
    )


def number_in(place: Place, turn: Int32) -> Int32:
    """Of the row that the caller's group gets in that turn, in the order of rows."""
    groups = place.groups // place.teams
    group = place.group // place.teams
    backwards = -(turn & 1)
    return turn * groups + (group ^ backwards) + (groups & backwards)


@cute.jit
def dealt_to(place: Place, number: Int32) -> tuple[Int32, Int32]:
    """The other way round: (the group that gets row `number` of the order, in which turn)."""
    turn = number // place.groups
    group = number - turn * place.groups
    if turn & 1 == 1:
        group = place.groups - 1 - group
    return group, turn
