"""A CTA's dynamic shared memory: regions and barriers by the plan's names."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.memory import SmemAllocator

from flashdsa.dsl.pipeline import Barriers, RingConsumer, RingProducer
from flashdsa.dsl.static import Static
from flashdsa.hw import MBARRIER_BYTES, WARP_SIZE
from flashdsa.plan import Barrier

ALIGNMENT = 1024
"""Alignment of the block in bytes: what swizzled tiles need."""
BARRIERS_REGION = "barriers"
"""The region that holds all barriers, if they have no regions of their own names."""


class Arena(NamedTuple):
    """One block of shared memory. The plan has `smem`, a SmemPlan, and `barriers`."""

    base: Any  # pointer to bytes, at a multiple of ALIGNMENT
    static: Static  # the plan

    @property
    def plan(self) -> Any:
        """The plan, which has the offsets."""
        return self.static.value

    def bytes(self, name: str) -> Any:
        """Pointer to a region."""
        return self.base + self.plan.smem.offset(name)

    def address(self, name: str) -> Int32:
        """Shared memory address of a region."""
        return Int32(self.base.toint()) + self.plan.smem.offset(name)

    def pointer(self, name: str, dtype: Any) -> Any:
        """Pointer to a region's elements."""
        return cute.recast_ptr(self.bytes(name), dtype=dtype)

    def array(self, name: str, dtype: Any, count: int) -> Any:
        """A region as a vector (count,)."""
        return cute.make_tensor(self.pointer(name, dtype), cute.make_layout(count))

    def barriers(self, name: str) -> Barriers:
        """A barrier of the plan."""
        planned = next(barrier for barrier in self.plan.barriers if barrier.name == name)
        first = cute.recast_ptr(self.base + barrier_offset(self.plan, planned), dtype=Int64)
        return Barriers(first, Static(planned))

    def producer(self, full: str, empty: str) -> RingProducer:
        """The end of a ring that fills it."""
        return RingProducer(self.barriers(full), self.barriers(empty))

    def consumer(self, full: str, empty: str) -> RingConsumer:
        """The end of a ring that reads it."""
        return RingConsumer(self.barriers(full), self.barriers(empty))


def allocate(plan: Any) -> Arena:
    """Allocate all of a kernel's dynamic shared memory; call it once."""
    return Arena(SmemAllocator().allocate(plan.smem.total, ALIGNMENT), Static(plan))


def barrier_offset(plan: Any, barrier: Barrier) -> int:
    """Bytes from the arena's base to the barrier's first stage."""
    names = [region.name for region in plan.smem.regions]
    if barrier.name in names:
        return plan.smem.offset(barrier.name)
    before = plan.barriers[: plan.barriers.index(barrier)]
    return plan.smem.offset(BARRIERS_REGION) + MBARRIER_BYTES * sum(one.stages for one in before)


@cute.jit
def initialise_barriers(arena: Arena, thread: Int32, warps: cutlass.Constexpr = 1) -> None:
    """Initialise every barrier of the plan; all threads call, and sync before anyone uses one.

    One initialisation follows the other in some ten clocks, so `warps` warps share them: each of
    the first ones takes one barrier, the last one the rest.
    """
    for warp in cutlass.range_constexpr(warps):
        if thread == warp * WARP_SIZE:
            own = slice(warp, None if warp == warps - 1 else warp + 1)
            for barrier in arena.plan.barriers[own]:
                arena.barriers(barrier.name).initialise()
    cute.arch.mbarrier_init_fence()
