"""States that an access finds, and new states that replace them."""

from __future__ import annotations

import numpy as np

from ptxemu.check.granules import Ids, Index
from ptxemu.check.shadow import Page
from ptxemu.check.tmem_page import TmemPage

_ID_BYTES = 4
_FEW = 256
"""Numbers up to which a set of Python integers is the quickest way to the distinct ones."""
_CAPACITY = 4096
"""States that there is room for at first."""


class Scans:
    """Scans granules with NumPy."""

    def __init__(self) -> None:
        self._new: Ids = np.zeros(_CAPACITY, dtype=np.int32)

    def states(self, page: Page | TmemPage, index: Index) -> list[int]:
        """The numbers of the states of granules, in order."""
        array, where = page.located(index)
        ids = array[where]
        data = ids.tobytes()
        if data == data[:_ID_BYTES] * ids.size:
            return [ids.item(0)]
        if ids.size <= _FEW:
            return sorted(set(ids.ravel().tolist()))
        flat = ids.reshape(-1)
        changes = np.flatnonzero(flat[1:] != flat[:-1])
        return sorted({int(flat[0]), *flat[changes + 1].tolist()})

    def fill(self, page: Page | TmemPage, index: Index, number: int) -> None:
        """Granules whose states were asked for get a number."""
        array, where = page.located(index)
        array[where] = number

    def replace(self, page: Page | TmemPage, index: Index, old: list[int], new: list[int]) -> None:
        """The same, each the one in `new` for its own, which is in `old`."""
        array, where = page.located(index)
        if old[-1] >= len(self._new):
            self._new = np.zeros(2 * old[-1], dtype=np.int32)
        self._new[old] = new
        array[where] = self._new.take(array[where])
