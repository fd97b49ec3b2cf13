"""The first and the last steps of a pair of CTAs that uses tensor memory; all threads take them."""

from typing import Any

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl import tmem
from flashdsa.dsl.arena import Arena, allocate, initialise_barriers
from flashdsa.dsl.cluster import leave_cluster


@cute.jit
def enter_pair(
    plan: cutlass.Constexpr, thread: Int32, warp: Int32, cta_group: cutlass.Constexpr[int]
) -> tuple[Arena, Any]:
    """Return shared memory with its barriers, and the holder of this CTA's tensor memory address.

    Both CTAs have initialised their barriers when it returns, so that either may arrive at the
    other's, and every thread sees the address of the allocation.

    Args:
        plan: an `Sm100Plan`. warp: of the CTA, uniform. cta_group: of all tcgen05 instructions.
    """
    arena = allocate(plan)
    hold = arena.pointer("tmem_start", Int32)
    if warp == 0:
        tmem.allocate(hold, plan.tmem.allocated, cta_group)
    initialise_barriers(arena, thread)
    tmem.before_sync()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    tmem.after_sync()
    return arena, hold


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
        plan, warp, cta_group: as of `enter_pair`. hold: its result. relaxed: as of `leave_cluster`.
    """
    tmem.before_sync()
    leave_cluster(relaxed)
    tmem.after_sync()
    if warp == 0:
        tmem.free(hold.load(), plan.tmem.allocated, cta_group)
