"""Context of both roles: the plan, shared memory, the CTA's work."""

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.arena import Arena
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import ITEM_BLOCKS, ScoresPlan
from flashdsa.kernels.attention.sm90.core.tile import TILE_KEYS
from flashdsa.kernels.attention.union.launch import Lists


class Context(NamedTuple):
    """One CTA's position in the launch. Its work items are first_item, first_item + num_ctas, ...

    An item is two neighbouring row blocks of a group: item i has the row blocks 2 i and 2 i + 1.
    """

    arena: Arena
    lists: Lists
    row_blocks: Int32  # of a group
    first_item: Int32
    num_ctas: Int32
    num_items: Int32
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> ScoresPlan:
        """The compile-time plan."""
        return self.arena.plan

    def group_of(self, item: Int32) -> Int32:
        """The item's group."""
        return item * ITEM_BLOCKS // self.row_blocks


@cute.jit
def tiles_of(ctx: Context, group: Int32) -> Int32:
    """Tiles of the group's list."""
    return (ctx.lists.counts[group] + (TILE_KEYS - 1)) // TILE_KEYS


@cute.jit
def release(ctx: Context, name: cutlass.Constexpr, stage: Int32) -> None:
    """Arrive once for the warp, whose lanes have synchronised after their reads."""
    if ctx.thread % 32 == 0:
        ctx.arena.barriers(name).arrive(stage)
