"""What every role knows: where things lie in both memories, and which queries it works on."""

from typing import Any, NamedTuple

from cutlass import Int32

from flashdsa.dsl import tmem
from flashdsa.dsl.arena import Arena
from flashdsa.dsl.pipeline import Barriers
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import BwdPlan


class Context(NamedTuple):
    """One CTA's place in the launch."""

    arena: Arena  # shared memory
    tmem: Int32  # TMEM address of the allocation
    cta_rank: Int32  # in the cluster: which half of the dims
    item: Int32  # the query, or the group of them
    num_blocks: Int32  # of B_TOPK keys, at least 1
    thread: Int32  # in its warpgroup, which is also its TMEM lane

    @property
    def plan(self) -> BwdPlan:
        """The budgets, known when the kernel is compiled."""
        return self.arena.plan

    def barriers(self, name: str) -> Barriers:
        """A barrier of the plan."""
        return self.arena.barriers(name)


def load_lane(ctx: Context, name: str, columns: int, offset: int = 0) -> Any:
    """This thread's lane of a TMEM region, a Vector of fp32; waits for it."""
    return tmem.load_lane(ctx.tmem, ctx.plan.tmem.column(name) + offset, ctx.thread, columns)


def store_lane(ctx: Context, name: str, words: Any, offset: int = 0) -> None:
    """A Vector of words to this thread's lane of a TMEM region; `tmem.wait_stored` waits."""
    tmem.store_lane(ctx.tmem, ctx.plan.tmem.column(name) + offset, ctx.thread, words)
