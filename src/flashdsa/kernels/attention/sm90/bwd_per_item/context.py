"""Context of all roles of the backward of 64 rows at a time: a CTA's items and their tiles."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.memory import Memory
from flashdsa.kernels.attention.lists import Lists
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import PerItemPlan


class Context(NamedTuple):
    """One CTA's position in the launch. Its work items are cta, cta + num_ctas, ..., with slots
    those at these positions of the order, with tickets those that it draws.

    Item i is row block i: the rows of Q from 64 i on. A CTA goes round the tiles of an item's list;
    its first tile is `spread` tiles after that of the previous CTA, in turns: so dQ has the same
    bits whoever has drawn the item.
    """

    memory: Memory
    lists: Lists
    row_blocks: Int32  # of a group: 2 with 128 heads, else 1
    cta: Int32
    num_ctas: Int32
    num_items: Int32
    spread: Int32
    thread: Int32  # in its warpgroup
    # (ORDER + groups,) int32, see `tickets.py`; with slots their order; None: the plan has neither
    tickets: Any

    @property
    def plan(self) -> PerItemPlan:
        return self.memory.plan

    def group_of(self, item: Int32) -> Int32:
        return item // self.row_blocks

    def line_of(self, of_lists: Any, item: Int32) -> Any:
        """Pointer to the first entry of the item's group in `rows` or `members`."""
        return of_lists.iterator + Int64(self.group_of(item)) * of_lists.shape[1]


@cute.jit
def item_by_turns(ctx: Context, position: Int32) -> Int32:
    """The item at a position of a CTA's turns."""
    item = position
    if cutlass.const_expr(ctx.plan.slots):
        item = ctx.tickets[position]
    return item


class Tiles(NamedTuple):
    """Tiles of an item: keys of its list, tiles, and the tile with which the CTA begins."""

    keys: Int32
    count: Int32
    first: Int32


@cute.jit
def tiles_of(ctx: Context, item: Int32) -> Tiles:
    """The item's tiles."""
    keys = ctx.lists.counts[ctx.group_of(item)]
    count = (keys + (ctx.plan.tile.keys - 1)) // ctx.plan.tile.keys
    cta = ctx.cta
    if cutlass.const_expr(ctx.plan.tickets):
        cta = item % ctx.num_ctas
    return Tiles(keys, count, cta * ctx.spread % cutlass.max(count, Int32(1)))


@cute.jit
def tile_after(tile: Int32, count: Int32) -> Int32:
    """The tile after `tile`, going round."""
    tile += 1
    if tile >= count:
        tile = Int32(0)
    return tile
