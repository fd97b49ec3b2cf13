"""What all roles know: the plan, shared memory, the CTA's work."""

from typing import Any, NamedTuple

from cutlass import Int32

from flashdsa.dsl.arena import Arena
from flashdsa.dsl.pipeline import Barriers
from flashdsa.kernels.sparse_mla.sm90.bwd.dkv.plan import SLICES, DkvPlan
from flashdsa.kernels.sparse_mla.sm90.bwd.grouped import Item, Lists, Work, item_at


class Context(NamedTuple):
    """One CTA's place in the launch."""

    arena: Arena
    work: Work
    lists: Lists
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> DkvPlan:
        """The budgets, known when the kernel is compiled."""
        return self.arena.plan

    def item(self, number: Any) -> Item:
        """Work item `number`."""
        return item_at(self.work, self.lists, number, SLICES)

    def barriers(self, name: str) -> Barriers:
        """A barrier of the plan."""
        return self.arena.barriers(name)
