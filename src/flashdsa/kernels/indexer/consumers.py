"""The consumer threads of a CTA: their context while they select, their syncs and sums."""

from typing import Any, NamedTuple

from cutlass import Int32, cute

from flashdsa.dsl.static import Static
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sizes import NUM_BINS
from flashdsa.kernels.indexer.smem_views import (
    SCRATCH_WARP_SUMS,
    ClusterBuffers,
    InputBuffers,
    SelectBuffers,
)


class Selecting(NamedTuple):
    """A consumer thread and what it selects with. Waits for page_full and tile_full, arrives at
    page_empty and tile_empty.

    The phases of events are no part of it: who waits returns them, as loops must carry them. Who
    writes to a buffer takes it out first, as a loop carries all fields of what it writes to.
    """

    inputs: InputBuffers  # the consumer's end
    select: SelectBuffers
    cluster: ClusterBuffers
    coord: Any  # Coord or PackedCoord
    output: Any  # Output
    published: Any  # Published; None: a row is one cluster's
    thread: Int32
    static: Static  # the plan; of a team, if the CTA has several
    team: Any = None  # Int32: the caller's, of which each selects in a row; None: only one

    @property
    def plan(self) -> Any:
        """The plan."""
        return self.static.value

    @property
    def threads(self) -> int:
        """Consumers that select in the row."""
        return int(self.plan.consumer_threads)

    @property
    def bins(self) -> int:
        """Bins of the row's histogram."""
        return NUM_BINS

    @property
    def most_parts(self) -> int:
        """CTAs that may share the row."""
        return int(self.plan.largest_cluster)

    def sync(self) -> None:
        """Sync them."""
        consumer_sync(self.plan)


def unpacked(s: Selecting) -> Selecting:
    """The same with all coordinates that selecting needs, of a `PackedCoord`."""
    return s._replace(coord=s.coord.unpacked())


def consumer_sync(plan: Any) -> None:
    """Sync all consumers of the plan, a team's if the plan is a team's; it orders their shared
    memory accesses."""
    thread, _, _ = cute.arch.thread_idx()
    barrier = plan.sync_barrier(thread)
    cute.arch.barrier(barrier_id=barrier, number_of_threads=plan.consumer_threads)


@cute.jit
def warp_sums(s: Selecting, of_warp: Int32) -> Int32:
    """Return the `of_warp` of warp i in lane i, 0 in the other lanes. One consumer sync."""
    select, thread, plan = s.select, s.thread, s.plan
    lane = thread % WARP_SIZE
    if lane == 0:
        select.scratch[SCRATCH_WARP_SUMS + thread // WARP_SIZE] = of_warp
    # All consumers: every warp's word is in scratch. It is written again only after another sync.
    consumer_sync(plan)
    sums = Int32(0)
    if lane < plan.consumer_warps:
        sums = select.scratch[SCRATCH_WARP_SUMS + lane]
    return sums


@cute.jit
def before_warp(sums: Int32, thread: Int32) -> Int32:
    """Sum of the `warp_sums` of the warps before the caller's."""
    before = Int32(0)
    if thread % WARP_SIZE < thread // WARP_SIZE:
        before = sums
    return cute.arch.warp_redux_sync(before, "add")
