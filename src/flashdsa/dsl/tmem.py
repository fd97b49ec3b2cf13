"""Tensor memory: its allocation, a thread's lane, and its hand-over between threads and MMAs."""

from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.pipeline import Barriers, wait_at_cluster_scope
from flashdsa.hw import WARP_SIZE

LANE_SHIFT = 16
"""Bits of a TMEM address below the lane (PTX ISA, "Tensor Memory Addressing")."""
WARP_LANES_SHIFT = LANE_SHIFT + WARP_SIZE.bit_length() - 1


def allocate(hold: Any, columns: int, cta_group: int = 1) -> None:
    """One warp: allocate columns for this CTA; their address goes to `hold`, pointer to shared
    memory.

    Args:
        cta_group: 2: a warp of either CTA of the pair calls, and both get the same columns.
    """
    prims.tcgen05_alloc(hold.to_llvm_ptr(), columns, group=f"cta_{cta_group}")
    prims.tcgen05_relinquish_alloc_permit(group=f"cta_{cta_group}")


def free(address: Any, columns: int, cta_group: int = 1) -> None:
    """The warp that allocated them: free the columns of `allocate`."""
    prims.tcgen05_dealloc(prims.make_tmem_ptr(address, Int32), columns, group=f"cta_{cta_group}")


def before_sync() -> None:
    """Fence before a synchronisation after which other threads use tensor memory."""
    prims.tcgen05_fence("before_thread_sync")


def after_sync() -> None:
    """Fence after a synchronisation with threads that used tensor memory."""
    prims.tcgen05_fence("after_thread_sync")


def lanes_at(tmem: Int32, column: Any, thread: Int32, dtype: Any) -> Any:
    """TMEM pointer to a column in the 32 lanes that this thread's warp reaches.

    Args:
        tmem: address of the allocation. thread: in its warpgroup, which is also its TMEM lane.
    """
    return prims.make_tmem_ptr(tmem + column + ((thread // WARP_SIZE) << WARP_LANES_SHIFT), dtype)


def load_lane(tmem: Int32, column: Any, thread: Int32, columns: int) -> Any:
    """Load this thread's lane of `columns` columns, a Vector of fp32, and wait for it."""
    values = prims.tcgen05_ld("32x32b", lanes_at(tmem, column, thread, Float32), num=columns)
    prims.tcgen05_wait("load")
    return values


def load_lane_twice(
    tmem: Int32, first: Any, second: Any, thread: Int32, columns: int
) -> tuple[Any, Any]:
    """Load this thread's lane of `columns` columns from `first` and from `second` on, and wait for
    both."""
    pointers = [lanes_at(tmem, column, thread, Float32) for column in (first, second)]
    values = [prims.tcgen05_ld("32x32b", pointer, num=columns) for pointer in pointers]
    prims.tcgen05_wait("load")
    return values[0], values[1]


def load_half_lanes(tmem: Int32, column: Any, thread: Int32, columns: int, second: int) -> Any:
    """The first 16 lanes of the warp's 32, two threads a lane: thread i and i + 16 of the warp get
    `columns` columns each, the second one those `second` further on. Waits for them."""
    pointer = lanes_at(tmem, column, thread, Float32)
    values = prims.tcgen05_ld("16x32bx2", pointer, num=columns, offset=second)
    prims.tcgen05_wait("load")
    return values


def store_lane(tmem: Int32, column: Any, thread: Int32, words: Any) -> None:
    """Store a Vector of 32-bit words to this thread's lane, one a column; `wait_stored` waits."""
    prims.tcgen05_st("32x32b", lanes_at(tmem, column, thread, Int32), words)


def wait_stored() -> None:
    """Wait for this thread's `store_lane`."""
    prims.tcgen05_wait("store")


def wait_then_tcgen05(barriers: Barriers, number: Any, stage: Any = None) -> None:
    """Wait for MMAs, or for threads that used tensor memory; tcgen05 instructions may follow.

    Args:
        number: use of a ring; with a stage: how often that one has completed before.
    """
    if stage is None:
        barriers.wait_for(number)
    else:
        barriers.wait_round(number, stage)
    after_sync()


def wait_for_tmem(barriers: Barriers, number: Any) -> None:
    """Wait for both CTAs' loads and stores of tensor memory, at whose ends the threads arrived with
    `arrive_at_peer_for_tmem`; tcgen05 instructions may follow. Nothing else is acquired.

    Args:
        number: how often the barrier, which has one stage, has completed before.
    """
    wait_at_cluster_scope(barriers.at(), number & 1, "relaxed")
    after_sync()


def arrive_after_tcgen05(barriers: Barriers, stage: Any = 0) -> None:
    """Arrive after this thread's loads and stores of tensor memory, which it has waited for."""
    before_sync()
    cute.arch.mbarrier_arrive(barriers.at(stage))
