"""Context of all roles: the plan, shared memory, the lists, the CTA's work."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.arena import Arena
from flashdsa.dsl.pipeline import Barriers
from flashdsa.kernels.indexer_training.sm90.bwd.plan import TILE_KEYS, BwdPlan


class Lists(NamedTuple):
    """Keys that have a gradient, for each group of neighbouring queries; see `lists.py`.

    capacity is a multiple of TILE_KEYS and at least queries * topk. Rows are -1 and gradients 0
    from counts[g] to the next multiple of TILE_KEYS; those after it must not be read.
    """

    rows: cute.Tensor  # (groups, capacity) int32
    gradients: cute.Tensor  # (groups * queries, capacity) fp32: 0 where a query has none
    counts: cute.Tensor  # (groups,) int32
    present: cute.Tensor  # (groups,) int32: bit i: query i of the group has a gradient


class Context(NamedTuple):
    """One CTA's position in the launch. Its work items are cta, cta + num_ctas, ...

    Item i is group i. A CTA goes round the tiles of an item's list; its first tile is `spread`
    tiles after that of the previous CTA.
    """

    arena: Arena
    lists: Lists
    cta: Int32
    num_ctas: Int32
    num_items: Int32
    spread: Int32
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> BwdPlan:
        """The compile-time plan."""
        return self.arena.plan

    def barriers(self, name: str) -> Barriers:
        """A barrier of the plan."""
        return self.arena.barriers(name)

    def rows_of(self, item: Int32) -> Any:
        """Pointer to the first number of the item's list."""
        return self.lists.rows.iterator + Int64(item) * self.lists.rows.shape[1]


class Tiles(NamedTuple):
    """Tiles of an item, and the one with which the CTA begins."""

    count: Int32
    first: Int32


@cute.jit
def tiles_of(ctx: Context, item: Int32) -> Tiles:
    """The item's tiles."""
    count = (ctx.lists.counts[item] + (TILE_KEYS - 1)) // TILE_KEYS
    return Tiles(count, ctx.cta * ctx.spread % cutlass.max(count, Int32(1)))


@cute.jit
def tile_behind(tile: Int32, count: Int32) -> Int32:
    """The tile after `tile`, going round."""
    tile += 1
    if tile >= count:
        tile = Int32(0)
    return tile
