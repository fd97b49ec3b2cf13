"""Pasts: what had happened before a fence.sc, to be told to other fence.sc's.

Of two fence.sc's that are in each other's scope one comes first for all (PTX ISA, "Fence-SC
Order"). If anything forces which, the later one acquires the past of the former. Pasts are filed by
the domains that a fence's scope reaches; neither they nor the files change once they are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping

Domain: TypeAlias = tuple[int, int]
"""Level of a scope, and the CTA or cluster of that level (0 for the device)."""


class Past:
    """Clocks of warps, and operations that are done, by cluster."""

    __slots__ = ("clocks", "done")

    def __init__(self, clocks: dict[int, NDArray[np.int32]], done: dict[int, int]) -> None:
        self.clocks = clocks
        self.done = done

    def includes(self, other: Past) -> bool:
        """Whether all of another past is in this one."""
        if self is other:
            return True
        for home, theirs in other.clocks.items():
            mine = self.clocks.get(home)
            if mine is None or (mine < theirs).any():
                return False
            if other.done[home] & ~self.done[home]:
                return False
        return True

    def united(self, other: Past) -> Past:
        """Both pasts."""
        clocks, done = dict(self.clocks), dict(self.done)
        for home, theirs in other.clocks.items():
            mine = clocks.get(home)
            clocks[home] = theirs if mine is None else np.maximum(mine, theirs)
            done[home] = done.get(home, 0) | other.done[home]
        return Past(clocks, done)


Pasts: TypeAlias = "Mapping[Domain, Past]"
"""Pasts by the domains that the fences' scopes reach."""
NO_PASTS: Pasts = {}


def united(one: Pasts, other: Pasts) -> Pasts:
    """Pasts that are in either; one of the two where that has all."""
    if not other or one is other:
        return one
    if not one:
        return other
    found: dict[Domain, Past] | None = None
    for domain, past in other.items():
        mine = one.get(domain)
        if mine is not None and mine.includes(past):
            continue
        if found is None:
            found = dict(one)
        found[domain] = past if mine is None or past.includes(mine) else mine.united(past)
    return one if found is None else found
