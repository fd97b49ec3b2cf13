"""Which states an access finds, and new ones put in their place: by NumPy, or by machine code."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from ptxemu.check.granules import Ids, Index, Pieces
from ptxemu.check.shadow import Page
from ptxemu.check.tmem_page import TmemPage

_ID_BYTES = 4
_FEW = 256
"""Numbers up to which a set of Python integers is the quickest way to the distinct ones."""
_CAPACITY = 4096
"""States that there is room for at first."""


class NumPyScans:
    """The quickest way where there are few accesses."""

    finds_outside = False
    """Whether `states` tells of granules that are not in the page."""

    def __init__(self) -> None:
        self._new: Ids = np.zeros(_CAPACITY, dtype=np.int32)

    def states(self, page: Page | TmemPage, index: Index, count: int) -> list[int]:
        """The numbers of the states of granules, in order.

        Args:
            count: how many states there are; all numbers are below it.
        """
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


class MachineScans(NumPyScans):
    """The same in machine code.

    Args:
        code: `ptxemu.compiled.shadow_code`.
    """

    finds_outside = True

    def __init__(self, code: ModuleType) -> None:
        super().__init__()
        self._outside: int = code.OUTSIDE
        self._scan_pieces, self._put_pieces = code.scan_pieces(), code.put_pieces()
        self._scan_rows, self._put_rows = code.scan_rows(), code.put_rows()
        self._make_room(_CAPACITY)

    def _make_room(self, capacity: int) -> None:
        """Arrays for so many states, of which the last two are shared with machine code."""
        self._capacity = capacity
        self._rows = np.zeros((3, capacity), dtype=np.int32)
        first = self._rows.ctypes.data
        step = 4 * capacity
        self._words = np.array([first, first + step, first + 2 * step, 0], dtype=np.int64)
        self._work = self._words.ctypes.data
        self._found = memoryview(self._rows[1])
        self._follower = memoryview(self._rows[2])

    def states(self, page: Page | TmemPage, index: Index, count: int) -> list[int]:
        """See `NumPyScans`; an empty list if granules are not in the page."""
        if count > self._capacity:
            self._make_room(2 * count)
        place = page.place
        if not place:
            place = page.place = page.ids.ctypes.data
            page.count = len(page.ids)
        if type(index) is slice or type(index) is tuple:
            found = self._scan_rows(place, page.count, *_rows(page, index), self._work)
        elif type(index) is Pieces:
            found = self._scan_pieces(place, page.count, *_pieces(index), self._work)
        else:
            return super().states(page, index, count)
        if found >= 0:
            return [found]
        if found == self._outside:
            return []
        return sorted(self._found[:-found])

    def fill(self, page: Page | TmemPage, index: Index, number: int) -> None:
        """See `NumPyScans`."""
        if type(index) is slice:
            page.ids[index] = number
        elif type(index) is Pieces:
            self._put_pieces(page.place, number, *_pieces(index), self._work)
        else:
            super().fill(page, index, number)

    def replace(self, page: Page | TmemPage, index: Index, old: list[int], new: list[int]) -> None:
        """See `NumPyScans`."""
        follower = self._follower
        for number, following in zip(old, new, strict=True):
            follower[number] = following
        if type(index) is slice or type(index) is tuple:
            self._put_rows(page.place, -1, *_rows(page, index), self._work)
        elif type(index) is Pieces and index.are_disjoint:  # else some would be replaced twice
            self._put_pieces(page.place, -1, *_pieces(index), self._work)
        else:
            super().replace(page, index, old, new)


def _pieces(index: Pieces) -> tuple[bytes, int, int, int, int]:
    """Of pieces their first bytes, the page's first byte, log2 of a granule, pieces and length."""
    starts = index.starts
    return starts.tobytes(), index.base, index.shift, len(starts), index.length


def _rows(
    page: Page | TmemPage, index: slice | tuple[slice, slice]
) -> tuple[int, int, int, int, int]:
    """The first granule, the distance of rows, 0, rows and their length: of a run, which is one
    row, or of lanes and columns."""
    if isinstance(index, slice):
        return index.start, 0, 0, 1, index.stop - index.start
    assert isinstance(page, TmemPage)
    lanes, columns = index
    width = page.width
    return (
        lanes.start * width + columns.start,
        width,
        0,
        lanes.stop - lanes.start,
        columns.stop - columns.start,
    )
