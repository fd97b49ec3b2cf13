"""A CTA's dynamic shared memory: a plan's regions and barriers as attributes."""

from typing import Any, NamedTuple, Self

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.memory import SmemAllocator

from flashdsa.dsl.pipeline import Barriers
from flashdsa.dsl.static import Static
from flashdsa.hw import MBARRIER_BYTES, WARP_SIZE
from flashdsa.plan import Barrier

ALIGNMENT = 1024
"""Alignment of the block in bytes: what swizzled tiles need."""
BARRIERS_REGION = "barriers"
"""The region that holds all barriers, if they have no regions of their own names."""


class Region(NamedTuple):
    """A `plan.SmemRegion` of a CTA."""

    base: Any  # pointer to the block's first byte
    static: Static  # the offset

    def bytes(self) -> Any:
        return self.base + self.static.value

    def address(self) -> Int32:
        return Int32(self.base.toint()) + self.static.value

    def pointer(self, dtype: Any) -> Any:
        return cute.recast_ptr(self.bytes(), dtype=dtype)

    def array(self, dtype: Any, count: int, part: Any = 0) -> Any:
        """Part number `part` of it, of equal parts, as a vector (count,)."""
        first = self.pointer(dtype)
        if not isinstance(part, int) or part:
            first += part * count
        return cute.make_tensor(first, cute.make_layout(count))


class Memory(NamedTuple):
    """One block of shared memory. Each region and each barrier of its plan is an attribute, by the
    name that the plan gives it: a `Region`, or `Barriers`.

    The plan has `smem`, a SmemPlan, and `barriers`.
    """

    base: Any  # pointer to bytes, at a multiple of ALIGNMENT
    static: Static  # the plan

    def __getattr__(self, name: str) -> Any:
        """The barrier of that name, or else the region.

        Raises:
            AttributeError: the plan has neither.
        """
        plan = self.plan
        for barrier in plan.barriers:
            if barrier.name == name:
                first = cute.recast_ptr(self.base + barrier_offset(plan, barrier), dtype=Int64)
                return Barriers(first, Static(barrier))
        if name in [region.name for region in plan.smem.regions]:
            return Region(self.base, Static(plan.smem.offset(name)))
        raise AttributeError(f"no region or barrier {name!r} in this plan")

    @classmethod
    def allocate(cls, plan: Any) -> Self:
        """Allocate all of a kernel's dynamic shared memory; call it once."""
        return cls(SmemAllocator().allocate(plan.smem.total, ALIGNMENT), Static(plan))

    @classmethod
    def begin(cls, plan: Any) -> Self:
        """All threads: allocate it, initialise every barrier, and meet."""
        memory = cls.allocate(plan)
        initialise_barriers(memory, cute.arch.thread_idx()[0])
        cute.arch.sync_threads()
        return memory

    @property
    def plan(self) -> Any:
        """The plan, which has the offsets."""
        return self.static.value


def barrier_offset(plan: Any, barrier: Barrier) -> int:
    """Bytes from the block's base to the barrier's first stage."""
    names = [region.name for region in plan.smem.regions]
    if barrier.name in names:
        return plan.smem.offset(barrier.name)
    before = plan.barriers[: plan.barriers.index(barrier)]
    return plan.smem.offset(BARRIERS_REGION) + MBARRIER_BYTES * sum(one.stages for one in before)


@cute.jit
def initialise_barriers(memory: Memory, thread: Int32, warps: cutlass.Constexpr = 1) -> None:
    """Initialise every barrier of the plan; all threads call, and sync before anyone uses one.

    One initialisation follows the other in some ten clocks, so `warps` warps share them: each of
    the first ones takes one barrier, the last one the rest.
    """
    for warp in cutlass.range_constexpr(warps):
        if thread == warp * WARP_SIZE:
            own = slice(warp, None if warp == warps - 1 else warp + 1)
            for barrier in memory.plan.barriers[own]:
                getattr(memory, barrier.name).initialise()
    cute.arch.mbarrier_init_fence()
