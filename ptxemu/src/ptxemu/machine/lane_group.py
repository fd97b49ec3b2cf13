"""Lanes of a warp that are at the same pc, and what they wait for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ptxemu.machine.lanes import Mask
from ptxemu.machine.sleepers import Sleepers


@dataclass(slots=True)
class Blocked:
    """Result of a visible step when the warp must wait.

    The scheduler asks `ready` until it is true, then calls `resume` (if any) and the warp goes on
    after the instruction. It asks again when one of `until` is woken; if `until` is empty, it asks
    all the time. `reason` is for the deadlock report. A wait with a time limit
    (mbarrier.try_wait) has `expire`: when nothing else can go on, the scheduler may call it
    instead of `resume`, and the warp goes on without what it waited for.
    """

    ready: Callable[[], bool]
    reason: Callable[[], str]
    resume: Callable[[], None] | None = None
    expire: Callable[[], None] | None = None
    until: tuple[Sleepers, ...] = ()


class Group:
    """Lanes of a warp at the same pc."""

    __slots__ = (
        "awaited",
        "blocked",
        "is_tired",
        "joined",
        "loops",
        "loops_since",
        "mask",
        "may_diverge",
        "passed",
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
        self.joined = 0
        """Lanes, as bits, that the instruction at `pc` has met, some at other instructions."""
        self.passed: Mask | None = None
        """Lanes that executed something behind the instruction at `pc` while it awaited them."""
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
