"""Rows and their lengths, the coordinates of a CTA, and its work tiles.

Groups of CTAs share rows; a group is a cluster or an equal part of one. The load warps tell the
consumers by a work tile which part of a row the next pages are.

A CTA scores the pages of its part in the order of positions if the list has room for all of them.
A longer part is scored from both ends by turns: pages 0, n - 1, 1, n - 2 and so on. Scores often
grow or fall with the position, as the last tokens matter most. In the order of positions each page
of growing scores would have better ones than those before, so that all entries would reach the
list, and it would be cut again and again. From both ends, the list has the best ones when it is cut
first, whichever end they are at.

The number of a warpgroup's next page is `consumer_warpgroups` higher, an even number, so that a
warpgroup has pages of one end only. Its positions are a constant number of tokens apart.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, Uint64, const_expr, cute

from flashdsa.dsl.opaque import opaque
from flashdsa.kernels.indexer.sizes import MAX_HALVINGS, MAX_OWN_ROWS, ORDERED_ROWS, TILE_WORDS
from flashdsa.kernels.indexer.smem_views import InputBuffers
from flashdsa.problem import MAX_NEXT_N, PAGE_SIZE


class Rows(NamedTuple):
    """Source of the lengths."""

    seq_lens: Any  # (B,) int32, device memory; of pairs (B / 2, 2)
    count: Int32  # of rows, or of pairs
    max_length: Int32  # tokens that the block table has room for
    requests: Any = None  # Int32: rows of the block table, B / next_n of them; None: B
    unscored: Any = 0  # tokens up to which a row is not scored


def rows_of(seq_lens: cute.Tensor, block_table: cute.Tensor, of_entry: int = PAGE_SIZE) -> Rows:
    """The rows of a launch, of which neighbouring ones may share a row of the table. of_entry:
    tokens that an entry of the table names."""
    requests, entries = block_table.shape
    room = cutlass.min(requests, 1) * entries * of_entry  # none in a table without rows
    return Rows(seq_lens, seq_lens.shape[0], room, requests)


@cute.jit
def pairs_of(rows: Rows) -> Rows:
    """Two neighbouring rows as one, as long as the longer of them; two such pairs may share a row
    of the table."""
    count = rows.count // 2
    lengths = cute.make_tensor(rows.seq_lens.iterator, cute.make_layout((count, 2), stride=(2, 1)))
    return Rows(lengths, count, rows.max_length, rows.requests, rows.unscored)


class WorkTile(NamedTuple):
    """The description of a part of a row, a word of shared memory each."""

    row: Int32  # -1 ends the work
    first_page: Int32  # of the row
    num_pages: Int32
    length: Int32  # of the row, in tokens
    num_splits: Int32  # clusters that share the row
    first_number: Int32  # pages that this CTA's stages before these hold


@cute.jit
def request_of(rows: Rows, row: Int32) -> Int32:
    """The row of the block table that has the row's pages: up to MAX_NEXT_N neighbours share one.
    It is never past the table's last row, even where B is no multiple of its rows."""
    request = row
    if const_expr(rows.requests is not None):
        if rows.requests < rows.count:
            share = Uint32(1 << 31)  # of 2**32, for each row of a request
            for next_n in cutlass.range_constexpr(3, MAX_NEXT_N + 1):
                if next_n * rows.requests <= rows.count:
                    share = Uint32((1 << 32) // next_n + (next_n & 1))
            request = Int32(Uint64(Uint32(row)) * Uint64(share) >> 32)
            request = cutlass.min(request, rows.requests - 1)
    return request


@cute.jit
def row_length(rows: Rows, row: Int32) -> Int32:
    """Tokens of the row, clamped to what the block table can name; 0 beyond the last row."""
    return clamped(rows, raw_length(rows, row))


@cute.jit
def raw_length(rows: Rows, row: Int32) -> Int32:
    """Return the row's length as it is in memory; 0 beyond the last row."""
    length = Int32(0)
    if row < rows.count:
        if const_expr(len(rows.seq_lens.shape) == 2):
            length = cutlass.max(rows.seq_lens[row, 0], rows.seq_lens[row, 1])
        else:
            length = rows.seq_lens[row]
    return length


def clamped(rows: Rows, length: Int32) -> Int32:
    """A length that the block table has room for."""
    return cutlass.min(cutlass.max(length, Int32(0)), rows.max_length)


@cute.jit
def divide(value: Int32, by: Int32, inverse: Float32) -> Int32:
    """value // by for values up to 2**22 * by, faster than a division."""
    quotient = Int32(Float32(value) * inverse)
    rest = value - quotient * by
    if rest < 0:
        quotient -= 1
    if rest >= by:
        quotient += 1
    return quotient


@cute.jit
def pages_to_score(rows: Rows, length: Int32) -> Int32:
    """Pages of a row, 0 when all its tokens are among the best without scores."""
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    if length <= rows.unscored:
        pages = Int32(0)
    return pages


def whole_stages(pages: Int32, plan: Any) -> Int32:
    """Pages of the whole stages that hold `pages`."""
    of_stage = plan.pages_per_stage
    return pages if of_stage == 1 else (pages + of_stage - 1) // of_stage * of_stage


def write_tile(tiles: cute.Tensor, stage: Int32, tile: WorkTile) -> None:
    """Describe a tile to the consumers, by one thread, which has acquired the stage."""
    for word, value in enumerate(tile):
        tiles[stage * TILE_WORDS + word] = value


def read_tile(tiles: cute.Tensor, stage: Int32) -> WorkTile:
    """Return the work tile that the load warp wrote."""
    return WorkTile(*(tiles[stage * TILE_WORDS + word] for word in range(TILE_WORDS)))


@cute.jit
def word_in(tiles: cute.Tensor, stage: Int32, name: cutlass.Constexpr) -> Int32:
    """One word of a description, until the stage is released: not kept in a register."""
    return tiles[stage * TILE_WORDS + WorkTile._fields.index(name)]


@cute.jit
def wait_for_tile(inputs: InputBuffers, number: Int32, plan: cutlass.Constexpr) -> WorkTile:
    """The description of the CTA's tile `number`, once it is announced."""
    state = inputs.tile_ring.state(number)
    # tile_full[stage], the round's phase: a load warp has written the description, and TMA the
    # queries and weights. All three may be read until this warp arrives at tile_empty[stage].
    inputs.tile_ring.wait(state)
    return read_tile(inputs.tiles, state.stage)


class Coord(NamedTuple):
    """Coordinates of a CTA among the groups of CTAs that share rows."""

    group: Int32
    num_groups: Int32
    first_rank: Int32  # the rank in its cluster of the group's first CTA
    part: Int32  # this CTA's rank in its group
    num_parts: Int32  # CTAs of a group
    num_splits: Int32  # neighbouring groups that share rows that are long enough
    turns: Any  # Int32: rows of the group, if lengths decide; None: they never do
    depth: Any  # Int32: pages in flight, in steps of 1 / DEPTH_STEPS; None: as many as stages
    together: Any  # Int32: neighbouring rows that are weighed as one; 0: the lengths do not decide;
    # None: they never do
    ordered: Any  # Boolean: they did, and the group's rows are in own_rows; None: never


class PackedCoord(NamedTuple):
    """Fields of `Coord` that selecting in a row needs, in one register through the loops that
    score."""

    bits: Int32  # first_rank, num_parts and part, 8 bits each

    @property
    def num_parts(self) -> Int32:
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
    if const_expr(plan.splits):
        turns, depth, ordered = Int32(1), Int32(plan.full_depth), cutlass.Boolean(False)
        together = weighed_together(rows, clusters)
    return Coord(
        cluster, clusters, Int32(0), part, num_parts, Int32(1), turns, depth, together, ordered
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


@cute.jit
def from_both_ends(num_pages: Int32, plan: cutlass.Constexpr) -> cutlass.Boolean:
    """Whether a part of so many pages is scored from both ends by turns."""
    longer = cutlass.Boolean(False)
    if const_expr(plan.pages_in_order is not None):
        longer = num_pages > plan.pages_in_order
    return longer


@cute.jit
def page_in_turn(turn: Int32, num_pages: Int32, plan: cutlass.Constexpr) -> Int32:
    """The page, among those of the part, that is scored in that turn."""
    page = turn
    if from_both_ends(num_pages, plan):
        page = turn // 2 if turn % 2 == 0 else num_pages - 1 - turn // 2
    return page


@cute.jit
def pages_from_front(turns: Int32, num_pages: Int32, plan: cutlass.Constexpr) -> Int32:
    """Pages of the part before the first one that comes after so many turns."""
    pages = turns
    if from_both_ends(num_pages, plan):
        pages = (turns + 1) // 2
    return pages


@cute.jit
def pages_between(turn: Int32, turns: Int32, num_pages: Int32, plan: cutlass.Constexpr) -> Int32:
    """Pages of the part that are before that of `turn`, and come after `turns` turns or never."""
    pages = Int32(0)
    if from_both_ends(num_pages, plan) and turn % 2 != 0:
        pages = num_pages - turns
    return pages


class Course(NamedTuple):
    """The pages of a warpgroup, which are those of every `consumer_warpgroups`-th turn."""

    first: Int32  # page of the part
    tokens_apart: Any  # from a page to the next one; fewer than 0 from the end


@cute.jit
def course_from(turn: Int32, num_pages: Int32, plan: cutlass.Constexpr) -> Course:
    """The course of a warpgroup from a turn on."""
    apart = Int32(PAGE_SIZE * plan.consumer_warpgroups)
    if from_both_ends(num_pages, plan):
        apart = apart // 2 if turn % 2 == 0 else -(apart // 2)
    return Course(page_in_turn(turn, num_pages, plan), apart)
