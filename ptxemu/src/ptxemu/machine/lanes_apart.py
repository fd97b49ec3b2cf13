"""Lanes of a warp that go apart where nothing holds them together, as hardware lets them.

Since Volta each thread has a pc of its own. What orders the lanes of a warp is an instruction that
waits for them: bar.warp.sync, shfl.sync and the like. Programs that rely on more give other results
when lanes go apart.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from ptxemu.machine.lane_group import Group
from ptxemu.machine.lanes import WARP_SIZE

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp

MOST_GROUPS = 6
"""Of a warp, where lanes part; branches may make more."""
STAYS = 0.995
"""Probability that the group that ran runs on, so that others fall far behind."""


class LanesApart:
    """Splits groups of lanes, and chooses which one runs."""

    def __init__(self, probability: float, seed: int) -> None:
        """`probability`: that a group parts in front of an instruction that can be seen."""
        self._probability = probability
        self._random = random.Random(seed)

    def runnable(self, warp: Warp) -> Group | None:
        """The warp's group that goes on, or None. Groups meet only where one awaits the others."""
        able = [group for group in warp.groups if warp.can_run(group)]
        group = next((group for group in able if group.awaited is not None), None)
        if group is not None:
            warp.merge(group)
        elif able:
            return self._next(warp, able)
        elif warp.groups and all(group.blocked is None for group in warp.groups):
            group = warp.diverged()
        if group is not None:
            group.awaited = None
        return group

    def _next(self, warp: Warp, runnable: list[Group]) -> Group:
        """One of a warp's groups that await nobody; it may part before."""
        stays = warp.group in runnable and self._random.random() < STAYS
        group = warp.group if stays else self._random.choice(runnable)
        lanes = np.flatnonzero(group.mask)
        parts = len(lanes) > 1 and len(warp.groups) < MOST_GROUPS
        if parts and self._random.random() < self._probability:
            count = self._random.randrange(1, len(lanes))
            left = np.zeros(WARP_SIZE, dtype=np.bool_)
            left[self._random.sample(lanes.tolist(), count)] = True
            warp.groups.append(Group(group.pc, group.mask & ~left))
            group.mask = left
        return group
