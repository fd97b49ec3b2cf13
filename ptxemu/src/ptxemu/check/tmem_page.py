"""Shadow of a CTA's tensor memory: granules of several lanes and columns, as small as was needed.

All accesses so far were of whole granules, so that the cells of one have had the same history.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.check.granules import Ids, Index, Pieces

ROWS, COLUMNS, CELL_SHIFT = 128, 512, 2
LANE_SHIFT, COLUMN_SHIFT = 5, 3
"""log2 of the lanes and columns of a granule at first: a warp's lanes, the smallest product's N."""
_KEPT = 256
"""Shapes of accesses whose granules are remembered."""
_ROW_BYTES = COLUMNS << CELL_SHIFT
_STEPS = (np.arange(ROWS, dtype=np.int64) * _ROW_BYTES).tobytes()


class TmemPage:
    """State numbers of a CTA's tensor memory."""

    __slots__ = ("_column_shift", "_grid", "_lane_shift", "_selected", "count", "place", "width")

    def __init__(self, state: int) -> None:
        self._selected: dict[tuple[bytes, int], list[Index]] = {}
        """Granules of accesses, by the starts (as bytes) and the size of an access."""
        self.place = self.count = 0
        """Same as in a `shadow.Page`."""
        self._lane_shift, self._column_shift = LANE_SHIFT, COLUMN_SHIFT
        self._grid: Ids = np.full((ROWS >> LANE_SHIFT, COLUMNS >> COLUMN_SHIFT), state, np.int32)
        self.width = COLUMNS >> COLUMN_SHIFT
        """Granules of a lane."""

    @property
    def ids(self) -> Ids:
        """All numbers, lanes first."""
        return self._grid.reshape(-1)

    def located(self, index: Index) -> tuple[Ids, Any]:
        """The array that `index` is of, and NumPy's index into it."""
        return self._grid if isinstance(index, tuple) else self.ids, index

    def select(self, starts: NDArray[np.int64], size: int) -> list[Index]:
        """The granules of an access (see `events.Access`)."""
        key = starts.tobytes(), size
        found = self._selected.get(key)
        if found is None:
            if len(self._selected) >= _KEPT:
                self._selected.clear()
            found = self._select(starts, size)
            self._selected[key] = found
        return found

    def _select(self, starts: NDArray[np.int64], size: int) -> list[Index]:
        found = _rectangles(starts, size)
        if found is None:
            self._refine(0, 0)
            count = np.arange(size >> CELL_SHIFT, dtype=np.int64)
            return [(starts >> CELL_SHIFT)[:, None] + count]
        lane_shift, column_shift = self._lane_shift, self._column_shift
        for lane, lanes, column, columns in found:
            lane_shift = min(lane_shift, _zeros(lane | lanes))
            column_shift = min(column_shift, _zeros(column | columns))
        if (lane_shift, column_shift) != (self._lane_shift, self._column_shift):
            self._refine(lane_shift, column_shift)
        return [
            (
                slice(lane >> lane_shift, lane + lanes >> lane_shift),
                slice(column >> column_shift, column + columns >> column_shift),
            )
            for lane, lanes, column, columns in found
        ]

    def _refine(self, lane_shift: int, column_shift: int) -> None:
        times = 1 << self._lane_shift - lane_shift, 1 << self._column_shift - column_shift
        self._grid = np.repeat(np.repeat(self._grid, times[0], 0), times[1], 1)
        self._lane_shift, self._column_shift = lane_shift, column_shift
        self.place, self.width = 0, COLUMNS >> column_shift
        self._selected.clear()

    def address(self, index: Index, position: int) -> int:
        """The first byte of the granule at `position` of what `index` selects."""
        width = self.width
        if isinstance(index, tuple):
            lanes, columns = index
            lane, column = divmod(position, columns.stop - columns.start)
            lane, column = lane + lanes.start, column + columns.start
        elif isinstance(index, slice):
            lane, column = divmod(int(index.start) + position, width)
        else:
            assert not isinstance(index, Pieces)
            lane, column = divmod(int(index.reshape(-1)[position]), width)
        cell = (lane << self._lane_shift) * COLUMNS + (column << self._column_shift)
        return int(cell) << CELL_SHIFT


def _zeros(number: int) -> int:
    """Return the number of lowest bits that are 0, for a number that is not 0."""
    return (number & -number).bit_length() - 1


def _rectangles(starts: NDArray[np.int64], size: int) -> list[tuple[int, int, int, int]] | None:
    """First lane, lanes, first column, columns, of pieces that are the same columns of some lanes
    in order; None for any other shape."""
    count, first = len(starts), int(starts[0])
    lane, byte = divmod(first, _ROW_BYTES)
    column, columns = byte >> CELL_SHIFT, size >> CELL_SHIFT
    if column + columns > COLUMNS:
        return None
    if (starts - first).tobytes() == _STEPS[: 8 * count]:
        return [(lane, count, column, columns)]
    lanes, rest = np.divmod(starts, _ROW_BYTES)
    if (rest != byte).any() or (lanes[1:] <= lanes[:-1]).any():
        return None
    runs = np.split(lanes, np.flatnonzero(lanes[1:] != lanes[:-1] + 1) + 1)
    return [(int(run[0]), len(run), column, columns) for run in runs]
