"""What every role knows: the plan, where things lie in shared memory and TMEM, which query."""

from typing import Any, NamedTuple

from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.static import Static
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import BwdPlan


class Context(NamedTuple):
    """One CTA's place in the launch."""

    static: Static
    arena: cute.Pointer  # shared memory, at a multiple of 1024
    tmem: Int32  # TMEM address of the allocation
    rank: Int32  # of the CTA in its cluster: which half of the dims
    query: Int32
    num_blocks: Int32  # of B_TOPK keys, at least 1
    thread: Int32  # in its warpgroup, which is also its TMEM lane

    @property
    def plan(self) -> BwdPlan:
        """The budgets, known when the kernel is compiled."""
        return self.static.value


def shared_at(c: Context, name: str) -> Any:
    """Address of a region of shared memory."""
    return Int32(c.arena.toint()) + c.plan.smem.offset(name)


def barrier_at(c: Context, name: str, stage: Any = 0) -> Any:
    """Pointer to a barrier."""
    return cute.recast_ptr(c.arena + c.plan.barrier_offset(name), dtype=Int64) + stage


def lanes_at(c: Context, name: str, dtype: Any, offset: int = 0) -> Any:
    """TMEM pointer to a region's column in the 32 lanes that this thread's warp reaches."""
    column = c.plan.tmem.column(name) + offset
    return prims.make_tmem_ptr(c.tmem + column + ((c.thread // 32) << 21), dtype)


def load_lane(c: Context, name: str, columns: int, offset: int = 0) -> Any:
    """This thread's lane of a TMEM region, a Vector of fp32; waits for it."""
    values = prims.tcgen05_ld("32x32b", lanes_at(c, name, Float32, offset), num=columns)
    prims.tcgen05_wait("load")
    return values


def wait_for_mma(barrier: Any, parity: Any) -> None:
    """Wait for a tcgen05.commit, or for threads that used TMEM; tcgen05 may follow."""
    cute.arch.mbarrier_wait(barrier, parity)
    prims.tcgen05_fence("after_thread_sync")


def arrive_after_tmem(barrier: Any) -> None:
    """Arrive behind this thread's tcgen05.ld and .st, which it has waited for."""
    prims.tcgen05_fence("before_thread_sync")
    cute.arch.mbarrier_arrive(barrier)
