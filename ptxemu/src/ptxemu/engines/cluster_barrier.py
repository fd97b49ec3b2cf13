"""The barrier of a cluster (PTX ISA, "barrier.cluster"): arrive and wait, phase by phase.

A phase completes when every thread of the cluster that has not exited has arrived.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.sleepers import Sleepers

if TYPE_CHECKING:
    from ptxemu.machine.lanes import Mask
    from ptxemu.machine.state import Cluster, Cta, Warp


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
