"""Lanes of a warp that are at the same place: what divergence makes and reconvergence merges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptxemu.machine.lanes import Mask

if TYPE_CHECKING:
    from ptxemu.machine.decoded import Blocked


class Group:
    """Lanes of a warp at the same pc."""

    __slots__ = (
        "awaited",
        "blocked",
        "is_tired",
        "loops",
        "loops_since",
        "mask",
        "may_diverge",
        "pc",
    )

    def __init__(self, pc: int, mask: Mask) -> None:
        self.pc = pc
        self.mask = mask
        self.blocked: Blocked | None = None
        self.awaited: Mask | None = None
        """Lanes that the instruction at `pc` waits for (see `machine.convergence`)."""
        self.may_diverge = False
        """The next instruction executes although lanes are missing that can never come."""
        self.loops, self.loops_since = 0, -1
        """Times it went back since `Machine.progress` had the second value."""
        self.is_tired = False
        """It has gone round for long, and others of the warp go first: it may wait for them."""

    def goes_back(self, progress: int, patience: int) -> None:
        """It takes a branch backwards while others of the warp could run."""
        if progress != self.loops_since:
            self.loops, self.loops_since = 0, progress
        self.loops += 1
        self.is_tired = self.loops >= patience
