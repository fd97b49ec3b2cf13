"""Context of every role: the plan, shared memory, the CTA's work."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.fragments import BF16_KIND
from flashdsa.dsl.grids import place_in_grid
from flashdsa.dsl.memory import Memory
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.tile import ROWS, TILES
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan


class Context(NamedTuple):
    """One CTA's position in the launch. Its work items are first_item, first_item + num_ctas, ...,
    or the one at place first_item of the order and those that it draws. An item is 64 rows of Q: of
    a group of queries, or of `blocks` items of one query each."""

    memory: Memory
    first_item: Int32
    num_ctas: Int32
    num_items: Int32
    blocks: Int32
    thread: Int32  # in its warpgroup

    @property
    def num_lists(self) -> Any:
        """Lists of slots, each of the items that share it."""
        return self.num_items // self.blocks

    @property
    def plan(self) -> FwdPlan:
        return self.memory.plan

    @property
    def kind(self) -> str:
        """Kind of P and V in the products."""
        return BF16_KIND

    def kind_of_slice(self, slice_: int) -> str:
        """Kind of a slice's columns of Q and K in the products."""
        return BF16_KIND

    def phase(self, step: Any) -> Int32:
        """The phase that step number `step` of the CTA completes, of every barrier but Q's."""
        return self.memory.p0_full.state(step).phase

    def flags(self, tile: int) -> Any:
        """A tile's flags of the step, LAST_STEP_OF_ITEM and LAST_STEP_OF_CTA."""
        return self.memory.flags.array(Int32, TILES)[tile]


@cute.jit
def locate(lse: cute.Tensor, memory: Memory) -> Context:
    """This thread's context."""
    thread, cta, num_ctas = place_in_grid()
    queries = Int32(lse.shape[0])
    group = memory.plan.group
    if cutlass.const_expr(group > 1):
        blocks = Int32(1)
        num_items = (queries + group - 1) // group
    else:
        blocks = (Int32(lse.shape[1]) + ROWS - 1) // ROWS
        num_items = queries * blocks
    return Context(memory, cta, num_ctas, num_items, blocks, thread % WARPGROUP_SIZE)
