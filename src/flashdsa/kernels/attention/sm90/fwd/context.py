"""Context of every role: the plan, shared memory, the CTA's work."""

from typing import Any, NamedTuple

from cutlass import Int32

from flashdsa.dsl.arena import Arena
from flashdsa.dsl.fragments import BF16_KIND
from flashdsa.dsl.pipeline import Barriers
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan


class Context(NamedTuple):
    """One CTA's position in the launch. Its work items are first_item, first_item + num_ctas, ...

    An item is 64 rows of Q: of a group of queries, or of `blocks` items of one query each.
    """

    arena: Arena
    first_item: Int32
    num_ctas: Int32
    num_items: Int32
    blocks: Int32
    thread: Int32  # in its warpgroup

    @property
    def plan(self) -> FwdPlan:
        """The compile-time plan."""
        return self.arena.plan

    def kind_of_piece(self, piece: int) -> str:
        """Kind of a piece's columns in the products."""
        return BF16_KIND

    def barriers(self, name: str) -> Barriers:
        """A barrier of the plan."""
        return self.arena.barriers(name)

    def phase(self, step: Any) -> Int32:
        """The phase that step number `step` of the CTA completes, of every barrier but Q's."""
        return self.barriers("p0_full").state(step).phase
