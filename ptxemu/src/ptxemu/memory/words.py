"""Runs of bytes seen as rows of words, so that 32 aligned lane accesses are one NumPy gather."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

_POSITIVE = np.array(0x7FFF_FFFF_FFFF_FFFF, dtype=np.int64)
"""Clears the sign: an address below the run becomes a row number far beyond its end."""


_View: TypeAlias = tuple[NDArray[np.int64], int, NDArray[np.int64], NDArray[Any]]
"""First row's address, bytes of a row and their logarithm, the rows."""


class Words:
    """The bytes at addresses [base, base + len(data)).

    A gather or scatter takes rows of `count` words of `element` bytes each. Rows start at multiples
    of their size, so an aligned address is a row number and NumPy's own bounds check is the check
    of the address.
    """

    __slots__ = ("_views", "base", "data")

    def __init__(self, base: int, data: NDArray[np.uint8]) -> None:
        self.base = base
        self.data = data
        self._views: dict[tuple[int, int], _View] = {}

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.base + len(self.data)

    def gather(self, addresses: NDArray[np.int64], element: int, count: int) -> NDArray[Any]:
        """Words at n addresses: (n,) for a count of 1, else (count, n).

        Args:
            element: bytes of a word: 1, 2, 4 or 8; count: words at each address.

        Raises:
            IndexError: an address that is misaligned or not inside.
        """
        index, rows = self._rows(addresses, element, count)
        found = rows.take(index, axis=0)
        return found if count == 1 else np.ascontiguousarray(found.T)

    def scatter(
        self, addresses: NDArray[np.int64], values: NDArray[Any], element: int, count: int
    ) -> None:
        """Write words (n,) or (count, n); of equal addresses the last one wins.

        Raises:
            IndexError: an address that is misaligned or not inside; nothing is written then.
        """
        index, rows = self._rows(addresses, element, count)
        rows[index] = values if count == 1 else values.T

    def exchange(
        self, addresses: NDArray[np.int64], values: NDArray[Any], element: int, count: int
    ) -> NDArray[np.bool_]:
        """Write like `scatter`; return at which of the n addresses the words were stored before."""
        index, rows = self._rows(addresses, element, count)
        new = values if count == 1 else values.T
        same: NDArray[np.bool_] = rows.take(index, axis=0) == new
        rows[index] = new
        return same if count == 1 else np.logical_and.reduce(same, axis=1)

    def holds(self, address: int, size: int) -> bool:
        """Whether [address, address + size) lies inside."""
        return self.base <= address and address + size <= self.end

    def _rows(
        self, addresses: NDArray[np.int64], element: int, count: int
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        view = self._views.get((element, count))
        if view is None:
            view = self._views[element, count] = self._view(element, count)
        origin, size, shift, rows = view
        relative = addresses - origin
        if size > 1 and int(np.bitwise_or.reduce(relative)) & (size - 1):
            raise IndexError("misaligned")
        return (relative & _POSITIVE) >> shift, rows

    def _view(self, element: int, count: int) -> _View:
        size = element * count
        padding = -self.base % size
        whole = max(len(self.data) - padding, 0) // size
        rows = self.data[padding : padding + whole * size].view(f"u{element}")
        if count > 1:
            rows = rows.reshape(whole, count)
        # NOTE: NumPy combines arrays with arrays of no dimensions faster than with scalars.
        origin = np.array(self.base + padding, dtype=np.int64)
        shift = np.array(size.bit_length() - 1, dtype=np.int64)
        return origin, size, shift, rows
