"""Context of both roles: the plan, shared memory, the CTA's work."""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from flashdsa.dsl.arena import Arena
from flashdsa.dsl.pipeline import PipelineState, advanced
from flashdsa.kernels.indexer_training.sm90.head_sums.plan import TargetPlan
from flashdsa.plan.row_tiles import TILE_ROWS


class Context(NamedTuple):
    """One CTA's position in the launch."""

    arena: Arena
    indices: cute.Tensor  # (S, topk) int32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    num_keys: Int32
    cta: Int32
    num_ctas: Int32
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> TargetPlan:
        """The compile-time plan."""
        return self.arena.plan

    @property
    def num_queries(self) -> Int32:
        """Queries of the launch."""
        return Int32(self.indices.shape[0])

    @property
    def topk(self) -> Int32:
        """Slots of a query."""
        return Int32(self.indices.shape[1])


class Item(NamedTuple):
    """A stretch of a query's slots, of which a CTA has the sums."""

    query: Int32  # at least num_queries after the CTA's last item
    begin: Int32  # the first slot, of a whole tile
    end: Int32  # one past the last that may be valid
    tiles: Int32  # at least one
    is_last: Boolean  # no tile of the query follows


@cute.jit
def item_at(ctx: Context, turn: Int32) -> Item:
    """The CTA's item in a turn of all CTAs.

    A turn is a query for each CTA. The last turn has fewer queries; equally many CTAs share each of
    them, by tiles.
    """
    first = turn * ctx.num_ctas
    left = ctx.num_queries - first
    query, part, parts = first + ctx.cta, Int32(0), Int32(1)
    if left > 0 and left < ctx.num_ctas:
        query, part, parts = first + ctx.cta % left, ctx.cta // left, ctx.num_ctas // left
    num_slots = slots_of(ctx, query)
    tiles = tiles_of(num_slots)
    each = (tiles + parts - 1) // parts
    before = part * each
    if before >= tiles or part >= parts:
        query = ctx.num_queries
    behind = cutlass.min(before + each, tiles)
    end = cutlass.min(behind * TILE_ROWS, num_slots)
    return Item(query, before * TILE_ROWS, end, behind - before, behind == tiles)


@cute.jit
def slots_of(ctx: Context, query: Int32) -> Int32:
    """Slots of the query that may be valid; any number after the last query."""
    count = ctx.topk
    if ctx.topk_length.shape[0] > 0:
        if query < ctx.num_queries:
            given = (ctx.topk_length.iterator + query).load()
            count = cutlass.min(cutlass.max(given, Int32(0)), count)
    return count


@cute.jit
def tiles_of(num_slots: Int32) -> Int32:
    """Tiles of `num_slots` slots; a query has one, even without a slot."""
    return cutlass.max((num_slots + (TILE_ROWS - 1)) // TILE_ROWS, Int32(1))


@cute.jit
def tiles_on(at: PipelineState, tiles: cutlass.Constexpr, plan: cutlass.Constexpr) -> PipelineState:
    """The position in the ring of keys that many tiles further on."""
    for _ in cutlass.range_constexpr(tiles):
        at = advanced(at, plan.key_pieces, plan.key_slots)
    return at


@cute.jit
def read_row(ctx: Context, query: Int32, slot: Int32, num_slots: Int32) -> Int32:
    """The row that a slot names; -1 where it is not valid.

    Args:
        query: any number. num_slots: of the query.
    """
    row = Int32(-1)
    if slot < num_slots and query < ctx.num_queries:
        row = (ctx.indices.iterator + (Int64(query) * ctx.topk + slot)).load()
        if row < 0 or row >= ctx.num_keys:
            row = Int32(-1)
    return row
