"""Work tiles: the load warps tell the consumers which part of a row the next pages are."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Uint32, Uint64, const_expr, cute

from flashdsa.kernels.indexer.sizes import TILE_WORDS
from flashdsa.kernels.indexer.smem_views import InputBuffers
from flashdsa.problem import MAX_NEXT_N, PAGE_SIZE


class Rows(NamedTuple):
    """Source of the lengths. The schedule's rows are pairs if rows are scored in pairs."""

    seq_lens: Any  # (B,) int32, device memory; of pairs (B / 2, 2)
    count: Int32  # of rows, or of pairs
    max_length: Int32  # tokens that the block table has room for
    requests: Any = None  # Int32: rows of the block table, B / next_n of them; None: B


def rows_of(seq_lens: cute.Tensor, block_table: cute.Tensor, of_entry: int = PAGE_SIZE) -> Rows:
    """The rows of a launch, of which neighbouring ones may share a row of the table.

    Args:
        of_entry: tokens that an entry of the table names.
    """
    requests, entries = block_table.shape
    room = cutlass.min(requests, 1) * entries * of_entry  # none in a table without rows
    return Rows(seq_lens, seq_lens.shape[0], room, requests)


@cute.jit
def pairs_of(rows: Rows) -> Rows:
    """Two neighbouring rows as one, as long as the longer of them; two such pairs may share a row
    of the table."""
    count = rows.count // 2
    lengths = cute.make_tensor(rows.seq_lens.iterator, cute.make_layout((count, 2), stride=(2, 1)))
    return Rows(lengths, count, rows.max_length, rows.requests)


class WorkTile(NamedTuple):
    """The description of a part of a row, a word of shared memory each."""

    row: Int32  # -1 ends the work
    first_page: Int32  # of the row
    num_pages: Int32
    length: Int32  # of the row, in tokens
    num_splits: Int32  # clusters that share the row; of pairs, see `sharing_word`
    first_number: Int32  # pages that this CTA's stages before these hold


class Sharers(NamedTuple):
    """The CTAs that share a row, with neighbouring numbers."""

    first: Int32
    count: Int32
    own: Int32  # the caller's index among them


SHARING_BITS = 10
"""Bits of each number in a `sharing_word`."""


def sharing_word(sharers: Sharers) -> Int32:
    """The same as a word."""
    return sharers.count | sharers.own << SHARING_BITS | sharers.first << 2 * SHARING_BITS


def sharers_in(word: Int32) -> Sharers:
    """The sharers of a `sharing_word`."""
    mask = (1 << SHARING_BITS) - 1
    return Sharers(word >> 2 * SHARING_BITS, word & mask, word >> SHARING_BITS & mask)


@cute.jit
def request_of(rows: Rows, row: Int32) -> Int32:
    """The row of the block table that has the row's pages: up to MAX_NEXT_N neighbours share one.

    It is never past the table's last row, even where B is no multiple of its rows.
    """
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
def pages_to_score(length: Int32, plan: cutlass.Constexpr) -> Int32:
    """Pages of a row, 0 when all its tokens are among the best without scores."""
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    if length <= plan.unscored_length:
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
