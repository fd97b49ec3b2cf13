"""Context of both roles: the plan, shared memory, the CTA's work."""

from typing import Any, NamedTuple

from cutlass import Int32

from flashdsa.dsl.arena import Arena
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.plan import DqPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.items import Item, Lists, Work, item_at


class Context(NamedTuple):
    """One CTA's position in the launch."""

    arena: Arena
    work: Work
    lists: Lists
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> DqPlan:
        """The compile-time plan."""
        return self.arena.plan

    def item(self, number: Any) -> Item:
        """Work item `number`."""
        return item_at(self.work, self.lists, number, self.plan.slices)

    def stage(self, stage: Any) -> Any:
        """Shared memory address of a stage: its first dS image."""
        return self.arena.address("stages") + stage * self.plan.stage_bytes
