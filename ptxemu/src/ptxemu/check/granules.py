"""Granules: the units of memory whose histories the shadow memory keeps, and how they are named."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int32]
"""Numbers of states, one a granule."""


_COUNTS: dict[int, NDArray[np.int64]] = {}


def _count(n: int) -> NDArray[np.int64]:
    """arange(n), made once."""
    found = _COUNTS.get(n)
    if found is None:
        found = _COUNTS[n] = np.arange(n, dtype=np.int64)
    return found


class Pieces:
    """Granules of pieces of memory: those from each start on, relative to a page's base."""

    __slots__ = ("are_disjoint", "base", "length", "shift", "starts")

    def __init__(
        self,
        starts: NDArray[np.int64],
        size: int,
        base: int,
        shift: int,
        *,
        are_disjoint: bool = False,
    ) -> None:
        self.starts = starts
        """First byte of each piece; other pieces may have been in other pages."""
        self.base = base
        """First byte of the page."""
        self.shift = shift
        """log2 of a granule's bytes."""
        self.length = size >> shift
        """Granules of a piece."""
        self.are_disjoint = are_disjoint
        """No granule is in two of them; if they make one run, they come in its order."""

    def granules(self) -> NDArray[np.int64]:
        """Their indices in the page, one row a piece."""
        first = self.starts - self.base >> self.shift
        if self.are_disjoint and len(first) * self.length == np.ptp(first) + self.length:
            first = np.sort(first)
        return first if self.length == 1 else first[:, None] + _count(self.length)


Index: TypeAlias = "slice | Pieces | NDArray[np.int64] | tuple[slice, slice]"
"""A run of granules, or pieces; of tensor memory lanes and columns, or any cells."""
