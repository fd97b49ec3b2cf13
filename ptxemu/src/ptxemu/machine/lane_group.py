"""Lanes of a warp that are at the same pc, and what they wait for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ptxemu.machine.lanes import WARP_SIZE, Lanes, Mask

# Warps that sleep until something happens, so that nobody asks them before.


class Sleeper(Protocol):
    """A warp."""

    def wake(self) -> None:
        """Let the scheduler ask it again."""
        ...


class Sleepers:
    """The warps that wait for one thing to change: a phase, an operation, the lanes of a cluster.

    Whoever changes it calls `wake`; the scheduler then asks each of the warps again whether it can
    go on. To wake a warp too early costs time and nothing else; one that is not woken never runs.
    """

    __slots__ = ("_warps",)

    def __init__(self) -> None:
        self._warps: set[Sleeper] | None = None

    def add(self, warp: Sleeper) -> None:
        """`warp` sleeps from now on."""
        if self._warps is None:
            self._warps = set()
        self._warps.add(warp)

    def wake(self) -> None:
        """It has changed."""
        if self._warps:
            for warp in self._warps:
                warp.wake()
            self._warps.clear()


# Lanes at one pc.


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
        *("awaited", "blocked", "is_tired", "joined", "loops", "loops_since", "mask"),
        *("may_diverge", "met", "passed", "pc"),
    )

    def __init__(self, pc: int, mask: Mask) -> None:
        self.pc = pc
        self.mask = mask
        self.blocked: Blocked | None = None
        self.awaited: Mask | None = None
        """Lanes that the instruction at `pc` waits for (see `machine.program`)."""
        self.may_diverge = False
        """The next instruction executes although lanes are missing that can never come."""
        self.joined = 0
        """Lanes, as bits, that the instruction at `pc` has met, some at other instructions."""
        self.met: tuple[Lanes | None, Mask] | None = None
        """The lanes that have met there, and what they give each other."""
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


# Lanes of a warp that go apart where nothing holds them together, as hardware lets them.
#
# Since Volta each thread has a pc of its own. What orders the lanes of a warp is an instruction
# that waits for them: bar.warp.sync, shfl.sync and the like. Programs that rely on more give other
# results when lanes go apart.

MOST_GROUPS = 6
"""Most groups of a warp when lanes part; branches may make more."""
STAYS = 0.995
"""Probability that the group that ran runs on, so that others fall far behind."""


class LanesApart:
    """Splits groups of lanes, and chooses which one runs."""

    def __init__(self, probability: float, seed: int) -> None:
        """`probability`: that a group parts in front of an instruction that can be seen."""
        self._probability = probability
        self._random = random.Random(seed)

    def choose(self, able: list[Group], last: Group, groups: list[Group]) -> Group:
        """One of the groups that can run and await nobody; it may part before.

        Args:
            last: the group that ran last. groups: the warp's, to which a part is added.
        """
        stays = last in able and self._random.random() < STAYS
        group = last if stays else self._random.choice(able)
        lanes = np.flatnonzero(group.mask)
        parts = len(lanes) > 1 and len(groups) < MOST_GROUPS and group.met is None
        if parts and self._random.random() < self._probability:
            count = self._random.randrange(1, len(lanes))
            left = np.zeros(WARP_SIZE, dtype=np.bool_)
            left[self._random.sample(lanes.tolist(), count)] = True
            groups.append(Group(group.pc, group.mask & ~left))
            group.mask = left
        return group
