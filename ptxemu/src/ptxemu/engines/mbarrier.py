"""mbarrier objects: arrivals, transaction counts and phases (PTX ISA, "mbarrier").

The phase is a growing integer, although hardware keeps one bit; a wait names a parity. The 64-bit
object's contents are opaque, so its state is kept beside shared memory, by CTA and offset.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ptxemu.errors import ExecutionError
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lane_group import Sleepers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ptxemu.events import Agent
    from ptxemu.machine.state import Cta

MAX_COUNT = 2**20 - 1


@dataclass(slots=True)
class Mbarrier:
    """One mbarrier object."""

    expected: int
    """Arrivals that complete a phase."""
    pending: int
    """Arrivals still missing in the current phase."""
    tx_count: int = 0
    """Bytes announced by expect_tx and not yet delivered; negative while data came first."""
    phase: int = 0
    """Completed phases."""
    is_fresh: bool = True
    """Nothing but an initialisation has reached it yet."""
    phase_changed: Sleepers = field(default_factory=Sleepers)
    """Woken when a phase completes, or the object ceases to be."""


class Mbarriers:
    """The mbarriers in one CTA's shared memory, by offset."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.by_offset: dict[int, Mbarrier] = {}

    def init(self, offset: int, count: int) -> None:
        """mbarrier.init: `count` arrivals a phase."""
        if offset % 8:
            raise ExecutionError(f"mbarrier at 0x{offset:x}: expected 8-byte alignment")
        if not 1 <= count <= MAX_COUNT:
            raise ExecutionError(f"mbarrier.init: expected a count in 1..{MAX_COUNT}; got {count}")
        replaced = self.by_offset.get(offset)
        self.by_offset[offset] = Mbarrier(count, count)
        if replaced is not None:
            replaced.phase_changed.wake()
        self.cta.machine.progress += 1

    def is_repeated(self, offset: int, count: int) -> bool:
        """Whether an initialisation with `count` arrivals would change nothing."""
        barrier = self.by_offset.get(offset)
        return barrier is not None and barrier.is_fresh and barrier.expected == count

    def invalidate(self, offset: int) -> None:
        """mbarrier.inval: the bytes may be used for something else."""
        self.at(offset).phase_changed.wake()
        del self.by_offset[offset]

    def at(self, offset: int) -> Mbarrier:
        """The object at `offset`, for an operation on it.

        Raises:
            ExecutionError: nothing was initialised there.
        """
        barrier = self.by_offset.get(offset)
        if barrier is None:
            raise ExecutionError(
                f"no mbarrier was initialised at shared 0x{offset:x} of cta {self.cta.ctaid}"
            )
        barrier.is_fresh = False
        return barrier

    def overlapping(self, starts: NDArray[np.int64], size: int) -> int | None:
        """The offset of an object that shares bytes with a piece [start, start + size)."""
        if not self.by_offset:
            return None
        low, high = int(starts.min()) - 7, int(starts.max()) + size
        for offset in self.by_offset:
            if low <= offset < high and ((starts - 8 < offset) & (offset < starts + size)).any():
                return offset
        return None

    def token(self, offset: int, phase: int) -> Hashable:
        """Return the token that arrivals of `phase` release and a wait for it acquires."""
        return ("mbarrier", self.cta.index, offset, phase)

    def expect_tx(self, offset: int, count: int) -> None:
        """tx_count += bytes."""
        barrier = self.at(offset)
        barrier.tx_count += count
        self._check_tx(barrier, offset)
        self._complete_if_due(barrier)

    def arrive(
        self, agent: Agent, offset: int, count: int = 1, *, expect: int = 0, scope: str = "cta"
    ) -> int:
        """`count` arrivals by `agent`, first `expect` bytes of expect_tx, as one step.

        Returns:
            the phase that the arrival belongs to (the state that mbarrier.arrive gives).
        """
        barrier = self.at(offset)
        phase = barrier.phase
        barrier.tx_count += expect
        if count > barrier.pending:
            raise ExecutionError(
                f"mbarrier at shared 0x{offset:x} of cta {self.cta.ctaid}: {count} arrivals in "
                f"phase {phase}, where {barrier.pending} of {barrier.expected} are missing"
            )
        observer = self.cta.machine.observer
        if observer is not None:
            observer.released(agent, self.token(offset, phase), scope)
        barrier.pending -= count
        self._complete_if_due(barrier)
        return phase

    def arrive_drop(
        self, agent: Agent, offset: int, count: int = 1, *, expect: int = 0, scope: str = "cta"
    ) -> int:
        """Arrive, and expect `count` arrivals fewer in the phases that follow."""
        self.at(offset).expected -= count
        return self.arrive(agent, offset, count, expect=expect, scope=scope)

    def add_pending(self, offset: int, count: int) -> None:
        """cp.async.mbarrier.arrive without .noinc: the current phase waits for `count` more."""
        self.at(offset).pending += count

    def complete_tx(self, agent: Agent, offset: int, count: int, *, scope: str = "cluster") -> None:
        """An asynchronous operation has delivered `count` bytes."""
        barrier = self.at(offset)
        observer = self.cta.machine.observer
        if observer is not None:
            observer.released(agent, self.token(offset, barrier.phase), scope)
        barrier.tx_count -= count
        self._check_tx(barrier, offset)
        self._complete_if_due(barrier)

    def has_completed(self, offset: int, parity: int) -> bool:
        """Whether the phase of `parity` (the current or the one before) has completed."""
        return (self.at(offset).phase & 1) != (parity & 1)

    def describe(self, offset: int) -> str:
        """Return the object's state as a text for messages."""
        barrier = self.at(offset)
        return (
            f"mbarrier at shared 0x{offset:x} of cta {self.cta.ctaid} is in phase "
            f"{barrier.phase}: {barrier.pending} of {barrier.expected} arrivals are missing, "
            f"tx-count {barrier.tx_count}"
        )

    def _complete_if_due(self, barrier: Mbarrier) -> None:
        self.cta.machine.progress += 1
        if barrier.pending == 0 and barrier.tx_count == 0:
            barrier.phase += 1
            barrier.pending = barrier.expected
            barrier.phase_changed.wake()

    def _check_tx(self, barrier: Mbarrier, offset: int) -> None:
        if abs(barrier.tx_count) > MAX_COUNT:
            raise ExecutionError(
                f"mbarrier at shared 0x{offset:x} of cta {self.cta.ctaid}: tx-count "
                f"{barrier.tx_count} is outside -{MAX_COUNT}..{MAX_COUNT}"
            )


mbarriers = EngineState(Mbarriers)
"""The mbarriers of a CTA."""
