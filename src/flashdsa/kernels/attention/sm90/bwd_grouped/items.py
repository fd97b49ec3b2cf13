"""Work items of the products: the groups of a launch, their lists, and where matrices lie; the
context of all roles."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.grids import place_in_grid
from flashdsa.dsl.memory import Memory
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.choice import is_taken
from flashdsa.kernels.attention.sm90.bwd_grouped.workspace import matrix_offset
from flashdsa.kernels.attention.sm90.core.tile import Tile


class Lists(NamedTuple):
    """The groups' lists of keys; see workspace.py."""

    ids: cute.Tensor  # (groups, capacity) int32
    counts: cute.Tensor  # (groups,) int32

    @property
    def capacity(self) -> Any:
        """Ids that each list has room for."""
        return Int32(self.ids.shape[1])

    def row(self, group: Any) -> Any:
        return self.ids.iterator + Int64(group) * self.capacity


class Groups(NamedTuple):
    """Groups of a launch: from `begin` to `end`, exclusive, if `choice` takes them."""

    begin: Int32
    end: Int32
    choice: cute.Tensor  # (1,) or (0,) int32, see choice.py
    number: Int32  # of the launch's grouping


class Work(NamedTuple):
    """The work items of a CTA: first, first + num_ctas, ... up to num_items, exclusive."""

    first: Int32
    num_ctas: Int32
    num_items: Int32
    group_begin: Int32


class Item(NamedTuple):
    """A slice of the dims of a group's product."""

    local: Int32  # the group, counted from the launch's first one
    group: Int32
    slice: Int32
    count: Int32  # keys in the group's list
    tiles: Int32


class Context(NamedTuple):
    """One CTA's position in the launch."""

    memory: Memory
    work: Work
    lists: Lists
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> Any:
        return self.memory.plan

    def item(self, number: Any) -> Item:
        return item_at(self.work, self.lists, number, self.plan)


@cute.jit
def locate(memory: Any, ids: cute.Tensor, counts: cute.Tensor, groups: Groups) -> Context:
    """This thread's context: the CTA's items, plan.slices a group."""
    thread, cta, num_ctas = place_in_grid()
    num_items = (groups.end - groups.begin) * memory.plan.slices
    if not is_taken(groups.choice, groups.number):
        num_items = Int32(0)
    work = Work(cta, num_ctas, num_items, groups.begin)
    return Context(memory, work, Lists(ids, counts), thread % WARPGROUP_SIZE)


@cute.jit
def item_at(work: Work, lists: Lists, number: Int32, plan: cutlass.Constexpr) -> Item:
    """Item `number`. The slices of a group have neighbouring numbers, so that they run at the same
    time and read the same from the second-level cache; the slice that a CTA takes goes round."""
    slices, keys = plan.slices, plan.tile.keys
    local = number // slices
    turn = number - local * slices + local // cutlass.max(work.num_ctas // slices, Int32(1))
    group = work.group_begin + local
    count = (lists.counts.iterator + group).load()
    return Item(local, group, turn % slices, count, (count + keys - 1) // keys)


def matrix_at(tile: Tile, workspace: Any, block: Any, number: Any, matrix: int) -> Any:
    """Pointer to a matrix; arguments as for `matrix_offset`."""
    block_bytes = workspace.shape[1]
    return workspace.iterator + matrix_offset(tile, Int64(block), number, block_bytes, matrix)
