"""What both roles know: the plan, shared memory, the CTA's work."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.arena import Arena
from flashdsa.kernels.indexer_training.sm90.head_sums.plan import HeadSumsPlan
from flashdsa.plan.row_tiles import TILE_ROWS


class Context(NamedTuple):
    """One CTA's place in the launch. Its queries are first_query, first_query + num_ctas, ..."""

    arena: Arena
    indices: cute.Tensor  # (S, topk) int32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    num_keys: Int32
    first_query: Int32
    num_ctas: Int32
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> HeadSumsPlan:
        """The budgets, known when the kernel is compiled."""
        return self.arena.plan

    @property
    def num_queries(self) -> Int32:
        """Of the launch."""
        return Int32(self.indices.shape[0])

    @property
    def topk(self) -> Int32:
        """Slots of a query."""
        return Int32(self.indices.shape[1])


@cute.jit
def slots_of(ctx: Context, query: Int32) -> Int32:
    """Slots of the query that may be valid; any number behind the last query."""
    count = ctx.topk
    if ctx.topk_length.shape[0] > 0:
        if query < ctx.num_queries:
            given = (ctx.topk_length.iterator + query).load()
            count = cutlass.min(cutlass.max(given, Int32(0)), count)
    return count


@cute.jit
def tiles_of(num_slots: Int32) -> Int32:
    """Tiles of so many slots; a query has one, even without a slot."""
    return cutlass.max((num_slots + (TILE_ROWS - 1)) // TILE_ROWS, Int32(1))


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
