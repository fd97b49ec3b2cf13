"""Context of all roles: the plan, shared memory, the CTA's work."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.arena import Arena
from flashdsa.dsl.pipeline import Barriers
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import SLICES, DkvPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Item, Lists, Work, item_at
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import ROW_BLOCKS

MANY_HEADS = 64
"""Minimum heads with which groups are small only where queries have little in common."""


class Context(NamedTuple):
    """One CTA's position in the launch."""

    arena: Arena
    work: Work
    lists: Lists
    heads: Int32
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> DkvPlan:
        """The compile-time plan."""
        return self.arena.plan

    def item(self, number: Any) -> Item:
        """Work item `number`."""
        return item_at(self.work, self.lists, number, SLICES)

    def barriers(self, name: str) -> Barriers:
        """A barrier of the plan."""
        return self.arena.barriers(name)


@cute.jit
def first_tile(ctx: Context, item: Item) -> Int32:
    """First tile of the item's list, which goes round: lists are in order of the keys, so groups
    that run at the same time and have much in common would else add to the same rows."""
    if cutlass.const_expr(ctx.plan.ordered):
        return Int32(0)
    at_once = cutlass.max(ctx.work.num_ctas // SLICES, Int32(1))
    first = item.local % at_once * item.tiles // at_once
    if cutlass.const_expr(ctx.plan.row_blocks < max(ROW_BLOCKS)):
        # Many heads in small groups: queries have little in common, and find rows in the
        # second-level cache that others have just added to.
        if ctx.heads >= MANY_HEADS:
            first = Int32(0)
    return first


@cute.jit
def tile_at(item: Item, first: Int32, number: Int32) -> Int32:
    """Tile of the list that the item takes as number `number`; after the last: item.tiles."""
    tile = first + number
    if tile >= item.tiles:
        tile -= item.tiles
    if number >= item.tiles:
        tile = item.tiles
    return tile
