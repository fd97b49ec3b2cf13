"""The 16 named barriers of a CTA (PTX ISA, "bar, barrier").

A warp arrives as a whole, when all of its live lanes have executed the instruction. A barrier
without a thread count is for all warps of the CTA that have not exited.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from ptxemu.errors import ExecutionError
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lane_group import Sleepers
from ptxemu.machine.lanes import Mask
from ptxemu.machine.state import Cluster, Cta, Warp

NUM_BARRIERS = 16
WARP_THREADS = 32


@dataclass(slots=True)
class Generation:
    """One use of a barrier, from its first arrival to its release."""

    number: int
    """Counts the uses of the barrier."""
    threads: int
    """Threads that it is for."""
    is_for_all: bool
    """It is for the CTA, so that exited warps are not waited for."""
    warps: list[int] = field(default_factory=list)
    """The warps that have arrived."""
    partial: dict[int, Mask] = field(default_factory=dict)
    """The lanes that have executed the instruction, of warps that have not arrived yet."""
    is_complete: bool = False
    num_holding: int = 0
    """Threads whose predicate holds, for barrier.red."""
    all_hold: bool = True
    completed: Sleepers = field(default_factory=Sleepers)

    @property
    def arrived(self) -> int:
        """Threads that have arrived."""
        return WARP_THREADS * len(self.warps)


class NamedBarriers:
    """The named barriers of one CTA."""

    def __init__(self, cta: Cta) -> None:
        self._cta = cta
        self._current: dict[int, Generation] = {}
        self._uses: dict[int, int] = {}

    def token(self, number: int, generation: Generation) -> Hashable:
        """Return the token that arrivals release and those who wait acquire."""
        return ("barrier", self._cta.index, number, generation.number)

    def arrive(
        self, warp: Warp, number: int, threads: int | None, lanes: Mask, *, is_aligned: bool
    ) -> Generation:
        """Lanes of a warp arrive; `try_complete` then says whether the barrier is released.

        Args:
            threads: the count that the instruction gives; None for the CTA's.
            is_aligned: the warp arrives now, whichever lanes are missing.

        Raises:
            ExecutionError: no such barrier or count, or one that differs from earlier arrivals'.
        """
        generation = self._generation(number, threads)
        executed = lanes | generation.partial.get(warp.index, lanes)
        if is_aligned or not (warp.alive & ~executed).any():
            generation.partial.pop(warp.index, None)
            generation.warps.append(warp.index)
        else:
            generation.partial[warp.index] = executed
        observer = self._cta.machine.observer
        if observer is not None:
            observer.released(warp, self.token(number, generation), "cta")
        self._cta.machine.progress += 1
        return generation

    def try_complete(self, number: int, generation: Generation) -> bool:
        """Release the barrier if nobody is missing; an exit may be what it still waited for.

        Raises:
            ExecutionError: more threads arrived than it is for.
        """
        if generation.is_complete:
            return True
        for index, lanes in list(generation.partial.items()):
            if not (self._cta.warps[index].alive & ~lanes).any():
                del generation.partial[index]
                generation.warps.append(index)
        if generation.arrived > generation.threads:
            raise ExecutionError(f"too many arrivals: {self.describe(number, generation)}")
        if generation.arrived < generation.threads and (
            not generation.is_for_all
            or any(w.groups and w.index not in generation.warps for w in self._cta.warps)
        ):
            return False
        generation.is_complete = True
        generation.completed.wake()
        del self._current[number]
        self._cta.machine.progress += 1
        return True

    def describe(self, number: int, generation: Generation) -> str:
        """Return a text for the deadlock report."""
        warps = ", ".join(str(index) for index in sorted(generation.warps))
        return (
            f"barrier {number} of cta {self._cta.ctaid}, use {generation.number}: "
            f"{generation.arrived} of {generation.threads} threads have arrived (warps {warps})"
        )

    def _generation(self, number: int, threads: int | None) -> Generation:
        if not 0 <= number < NUM_BARRIERS:
            raise ExecutionError(f"barrier {number}: expected one of 0..{NUM_BARRIERS - 1}")
        if threads is not None and (threads <= 0 or threads % WARP_THREADS):
            raise ExecutionError(
                f"barrier {number}: expected a thread count that is a multiple of {WARP_THREADS}; "
                f"got {threads}"
            )
        is_for_all = threads is None
        if threads is None:
            threads = WARP_THREADS * len(self._cta.warps)
        generation = self._current.get(number)
        if generation is None:
            use = self._uses[number] = self._uses.get(number, -1) + 1
            generation = self._current[number] = Generation(use, threads, is_for_all)
        elif generation.threads != threads:
            raise ExecutionError(
                f"barrier {number} of cta {self._cta.ctaid} is for {threads} threads here and for "
                f"{generation.threads} in an earlier arrival (warps {generation.warps})"
            )
        return generation


named_barriers = EngineState(NamedBarriers)
"""The named barriers of a CTA."""


# The barrier of a cluster (PTX ISA, "barrier.cluster"): arrive and wait, phase by phase.
#
# A phase completes when every thread of the cluster that has not exited has arrived.


class ClusterBarrier:
    """The barrier of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.phase = 0
        """Completed phases."""
        self.changed = (Sleepers(), cluster.lanes_exited)
        """A phase completed, or may now."""
        self._arrived: dict[Warp, Mask] = {}
        """The lanes that have arrived in this phase."""
        self._ahead: dict[Warp, Mask] = {}
        """The lanes that have arrived twice: hardware counts the second for the next phase."""

    def token(self, phase: int) -> Hashable:
        """Return the token that arrivals of `phase` release and its waits acquire."""
        return ("cluster_barrier", self._cluster.index, phase)

    def arrive(self, warp: Warp, lanes: Mask) -> int:
        """Lanes arrive; the phase that they arrive in."""
        before = self._arrived.get(warp)
        self._arrived[warp] = lanes if before is None else before | lanes
        phase = self.phase
        if before is not None and (before & lanes).any():
            phase += 1
            ahead = self._ahead.get(warp)
            self._ahead[warp] = before & lanes if ahead is None else ahead | before & lanes
        self._cluster.ctas[0].machine.progress += 1
        self.has_completed(self.phase)
        return phase

    def has_completed(self, phase: int) -> bool:
        """Whether `phase` is complete; an exit may be what it still waited for."""
        if self.phase > phase:
            return True
        if not self._arrived or self._missing_warp() is not None:
            return False
        self.phase += 1
        self._arrived, self._ahead = self._ahead, {}
        self.changed[0].wake()
        self._cluster.ctas[0].machine.progress += 1
        return True

    def describe(self, phase: int) -> str:
        """Return a text for the deadlock report."""
        warp = self._missing_warp()
        missing = "" if warp is None else f"; {warp.label} is missing"
        return f"cluster barrier of cluster {self._cluster.index}, phase {phase}{missing}"

    def _missing_warp(self) -> Warp | None:
        nobody = np.zeros(32, dtype=np.bool_)
        for cta in self._cluster.ctas:
            for warp in cta.warps:
                if warp.groups and (warp.alive & ~self._arrived.get(warp, nobody)).any():
                    return warp
        return None


_of_first_cta: EngineState[Cta, ClusterBarrier] = EngineState(
    lambda cta: ClusterBarrier(cta.cluster)
)


def cluster_barrier(cluster: Cluster) -> ClusterBarrier:
    """The barrier of a cluster."""
    return _of_first_cta(cluster.ctas[0])
