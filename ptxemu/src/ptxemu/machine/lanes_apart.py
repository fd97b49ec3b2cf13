"""Lanes of a warp that go apart where nothing holds them together, as hardware lets them.

Since Volta each thread has a pc of its own. What orders the lanes of a warp is an instruction that
waits for them: bar.warp.sync, shfl.sync and the like. Programs that rely on more give other results
when lanes go apart.
"""

from __future__ import annotations

import random

import numpy as np

from ptxemu.machine.lane_group import Group
from ptxemu.machine.lanes import WARP_SIZE

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
        parts = len(lanes) > 1 and len(groups) < MOST_GROUPS
        if parts and self._random.random() < self._probability:
            count = self._random.randrange(1, len(lanes))
            left = np.zeros(WARP_SIZE, dtype=np.bool_)
            left[self._random.sample(lanes.tolist(), count)] = True
            groups.append(Group(group.pc, group.mask & ~left))
            group.mask = left
        return group
