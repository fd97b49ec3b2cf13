"""Context of all roles: the plan, shared memory, the CTA's work."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.arena import Arena
from flashdsa.dsl.pipeline import Barriers
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import FusedPlan
from flashdsa.kernels.attention.sm90.core.tile import TILE_KEYS
from flashdsa.kernels.attention.union.launch import Lists


class Context(NamedTuple):
    """One CTA's position in the launch. Its work items are cta, cta + num_ctas, ...

    Item i is row block i: the rows of Q from 64 i on. A CTA goes round the tiles of an item's list;
    its first tile is `spread` tiles after that of the previous CTA.
    """

    arena: Arena
    lists: Lists
    row_blocks: Int32  # of a group: 2 with 128 heads, else 1
    cta: Int32
    num_ctas: Int32
    num_items: Int32
    spread: Int32
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> FusedPlan:
        """The compile-time plan."""
        return self.arena.plan

    def barriers(self, name: str) -> Barriers:
        """A barrier of the plan."""
        return self.arena.barriers(name)

    def group_of(self, item: Int32) -> Int32:
        """The item's group."""
        return item // self.row_blocks

    def line_of(self, of_lists: Any, item: Int32) -> Any:
        """Pointer to the first entry of the item's group in `rows` or `members`."""
        return of_lists.iterator + Int64(self.group_of(item)) * of_lists.shape[1]


class Tiles(NamedTuple):
    """Tiles of an item: keys of its list, tiles, and the tile with which the CTA begins."""

    keys: Int32
    count: Int32
    first: Int32


@cute.jit
def tiles_of(ctx: Context, item: Int32) -> Tiles:
    """The item's tiles."""
    keys = ctx.lists.counts[ctx.group_of(item)]
    count = (keys + (TILE_KEYS - 1)) // TILE_KEYS
    return Tiles(keys, count, ctx.cta * ctx.spread % cutlass.max(count, Int32(1)))


@cute.jit
def tile_behind(tile: Int32, count: Int32) -> Int32:
    """The tile after `tile`, going round."""
    tile += 1
    if tile >= count:
        tile = Int32(0)
    return tile
