"""Coordinates of a CTA: groups of CTAs share rows, and a group is a cluster or an equal part of
one."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, const_expr, cute

from flashdsa.dsl.opaque import opaque
from flashdsa.kernels.indexer.schedule.work_tile import Rows
from flashdsa.kernels.indexer.sizes import MAX_HALVINGS, MAX_OWN_ROWS, ORDERED_ROWS
from flashdsa.problem import MAX_NEXT_N


class Coord(NamedTuple):
    """Coordinates of a CTA among the groups of CTAs that share rows."""

    group: Int32
    num_groups: Int32
    first_rank: Int32  # the rank in its cluster of the group's first CTA
    part: Int32  # this CTA's rank in its group
    num_parts: Int32  # CTAs of a group
    num_splits: Int32  # neighbouring groups that share rows that are long enough; 0: it has a span
    turns: Any  # Int32: rows of the group, if lengths decide; None: they never do
    depth: Any  # Int32: pages in flight, in steps of 1 / DEPTH_STEPS; None: as many as stages
    together: Any  # Int32: neighbouring rows that are weighed as one; 0: the lengths do not decide;
    # None: they never do
    ordered: Any  # Boolean: they did, and the group's rows are in own_rows; None: never

    @property
    def has_span(self) -> Any:
        """Whether the CTA has a span of all rows (see schedule/spans.py)."""
        return self.num_splits == 0


class PackedCoord(NamedTuple):
    """Fields of `Coord` that selecting in a row needs, in one register through the loops that
    score."""

    bits: Int32  # first_rank, num_parts and part, 8 bits each

    @property
    def num_parts(self) -> Int32:
        """See `Coord`."""
        return (opaque(self.bits) >> 8) & 0xFF

    def unpacked(self) -> Coord:
        """See `Coord`; the fields that selecting does not need have no meaning."""
        bits = opaque(self.bits)
        zero = Int32(0)
        return Coord(
            zero, zero, bits >> 16, bits & 0xFF, (bits >> 8) & 0xFF, zero, None, None, None, None
        )


def packed(coord: Coord) -> PackedCoord:
    """The same in one register."""
    return PackedCoord(coord.part | coord.num_parts << 8 | coord.first_rank << 16)


COORD_WORDS = 8
"""Words of the numbers among the fields, which come first."""


@cute.jit
def find_coord(rows: Rows, plan: cutlass.Constexpr) -> Coord:
    """The calling CTA's coordinates if groups are clusters, and none share a row."""
    cluster, _, _ = cute.arch.cluster_idx()
    clusters, _, _ = cute.arch.cluster_dim()
    num_parts = cute.arch.cluster_size()
    part = cute.arch.block_idx_in_cluster()
    turns, depth, together, ordered = None, None, None, None
    if const_expr(plan.scheduled):
        turns, depth, ordered = Int32(1), Int32(plan.full_depth), cutlass.Boolean(False)
        together = weighed_together(rows, clusters)
    return Coord(
        cluster,
        clusters,
        Int32(0),
        part,
        num_parts,
        Int32(1),
        turns,
        depth,
        together,
        ordered,
    )


@cute.jit
def weighed_together(rows: Rows, clusters: Int32) -> Int32:
    """The coordinates' `together`: 1 of few rows, those of a request of more, 0 of too many."""
    together = Int32(1)
    if rows.count > ORDERED_ROWS:
        together = Int32(0)
        if const_expr(rows.requests is not None):
            for next_n in cutlass.range_constexpr(2, MAX_NEXT_N + 1):
                if rows.requests * next_n == rows.count and rows.requests <= ORDERED_ROWS:
                    together = Int32(next_n)
    if rows.count > MAX_OWN_ROWS * clusters:
        together = Int32(0)
    return together


def most_halvings(coord: Coord) -> Int32:
    """Number of times that clusters can be halved, at most MAX_HALVINGS."""
    size = coord.num_parts | (1 << MAX_HALVINGS)
    return Int32(cute.arch.popc((size & -size) - 1))


@cute.jit
def split(coord: Coord, halvings: Int32) -> Coord:
    """The caller's coordinates if each cluster is halved `halvings` times."""
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


def index_of_turn(group: Int32, groups: Int32, turn: Int32) -> Int32:
    """Index in the order of the row that a group gets in a turn: odd turns go backwards."""
    backwards = -(turn & 1)
    return turn * groups + (group ^ backwards) + (groups & backwards)
