"""The first and the last steps of a pair of CTAs that uses tensor memory; all threads take them."""

from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl import cluster, tmem
from flashdsa.dsl.memory import Memory, initialise_barriers


@cute.jit
def enter_pair(
    memory: Memory, thread: Int32, warp: Int32, cta_group: cutlass.Constexpr[int]
) -> Any:
    """Initialise the barriers; return the holder of this CTA's tensor memory address.

    Both CTAs have initialised their barriers when it returns, so that either may arrive at the
    other's, and every thread sees the address of the allocation.

    Args:
        warp: of the CTA, uniform. cta_group: of all tcgen05 instructions.
    """
    hold = memory.tmem_start.pointer(Int32)
    # A pair allocates together: the peer must have started (PTX ISA, tcgen05.alloc).
    if cutlass.const_expr(cta_group == 2):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    if warp == 0:
        tmem.allocate(hold, memory.plan.tmem.allocated, cta_group)
    initialise_barriers(memory, thread)
    tmem.before_sync()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    tmem.after_sync()
    return hold


@cute.jit
def leave_pair(
    plan: cutlass.Constexpr,
    hold: Any,
    warp: Int32,
    cta_group: cutlass.Constexpr[int],
    relaxed: cutlass.Constexpr[bool] = False,
) -> None:
    """Wait until both CTAs are done, as stores, arrivals, commits and MMAs of the one come to the
    other's memory. Then give tensor memory back.

    Args:
        plan: an `Sm100Plan`. warp, cta_group: as of `enter_pair`. hold: its result.
        relaxed: as of `leave_cluster`.
    """
    tmem.before_sync()
    cluster.leave_cluster(relaxed)
    tmem.after_sync()
    if warp == 0:
        tmem.free(hold.load(), plan.tmem.allocated, cta_group)
