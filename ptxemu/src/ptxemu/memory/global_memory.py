"""Global memory: the caller's arrays by address, with bounds; also parameters and constants."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import ExecutionError
from ptxemu.memory.words import Words

TABLE_WORDS = 4
"""Words of an allocation in `GlobalMemory.table`: first address, end, the number added to an
address to find the byte, and 1 if writing is allowed."""
_LOWEST_HOST, _HIGHEST_HOST = 0x1_0000, 1 << 47
"""User addresses of a 64-bit process."""


@dataclass(slots=True)
class Allocation:
    """Bytes at a global address: `data` is a view of the owner's memory."""

    base: int
    data: NDArray[np.uint8]
    name: str
    writable: bool = True
    is_shared: bool = False
    """Processes forked from this one write to the same bytes, not to a copy."""
    words: Words = field(init=False, repr=False)
    """The same bytes as rows of words."""

    def __post_init__(self) -> None:
        """Make the words."""
        self.words = Words(self.base, self.data)

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.base + len(self.data)

    @property
    def may_be_written(self) -> bool:
        """Whether kernels may write to it."""
        return bool(self.writable and self.data.flags.writeable)


class GlobalMemory:
    """Allocations sorted by address.

    Host memory that nobody registered is reachable only with `allow_unregistered`; its bounds are
    unknown then, as when a compiled host function passes bare pointers.
    """

    def __init__(self, *, allow_unregistered: bool = False) -> None:
        self._allocations: list[Allocation] = []
        self._bases: list[int] = []
        self._last: Allocation | None = None
        self._host: Words | None = None
        self._table: tuple[int, int] | None = None
        self._rows: NDArray[np.uint64] = np.zeros((0, TABLE_WORDS), np.uint64)
        self.allow_unregistered = allow_unregistered
        self.blank: list[tuple[int, int]] = []
        """Ranges of addresses that nobody has written: begin and end of each."""
        self.blank_now: Callable[[], list[tuple[int, int]]] = list
        """Tells which of these ranges are left after a launch."""

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """Everything that is registered, by address."""
        return tuple(self._allocations)

    def table(self) -> tuple[int, int]:
        """Return the address of a table of all allocations, for machine code, and its length.

        The table stays, and what is returned is the same object, until another allocation is
        registered.
        """
        if self._table is None:
            entries = [
                (
                    a.base,
                    a.end,
                    (int(a.data.ctypes.data) - a.base) & (1 << 64) - 1,
                    a.may_be_written,
                )
                for a in self._allocations
            ]
            self._rows = np.array(entries, np.uint64).reshape(-1, TABLE_WORDS)
            self._table = int(self._rows.ctypes.data), len(self._rows)
        return self._table

    def register(
        self,
        data: NDArray[np.uint8],
        name: str,
        *,
        base: int | None = None,
        writable: bool = True,
        is_shared: bool = False,
    ) -> Allocation:
        """Make `data` (contiguous bytes) addressable, at its own address unless `base` is given.

        A range inside one that is registered already is left to that one; ranges that overlap
        otherwise are merged by the caller (views of one storage).
        """
        base = int(data.ctypes.data) if base is None else base
        found = self.find(base, len(data))
        if found is not None:
            return found
        allocation = Allocation(base, data, name, writable, is_shared)
        at = bisect_right(self._bases, base)
        self._allocations.insert(at, allocation)
        self._table = None
        self._bases.insert(at, base)
        return allocation

    def find(self, address: int, size: int = 1) -> Allocation | None:
        """The allocation that holds [address, address + size), or None."""
        last = self._last
        if last is not None and last.base <= address and address + size <= last.end:
            return last
        at = bisect_right(self._bases, address) - 1
        if at >= 0:
            allocation = self._allocations[at]
            if address + size <= allocation.end:
                self._last = allocation
                return allocation
        return None

    def nearest(self, address: int) -> str:
        """Describe where `address` lies relative to the allocation before it (for messages)."""
        at = bisect_right(self._bases, address) - 1
        if at < 0:
            return "before every allocation"
        allocation = self._allocations[at]
        return f"{address - allocation.end} bytes behind the end of {allocation.name}"

    def span(self, address: int, size: int) -> NDArray[np.uint8]:
        """The bytes [address, address + size), as a view.

        Raises:
            ExecutionError: they are not all inside one allocation.
        """
        allocation = self.find(address, size)
        if allocation is not None:
            start = address - allocation.base
            return allocation.data[start : start + size]
        if self.allow_unregistered and address > 0x1000:
            return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        raise ExecutionError(
            f"illegal global address 0x{address:x} ({size} bytes): {self.nearest(address)}"
        )

    def words_at(self, address: int, size: int) -> Words | None:
        """The words that hold [address, address + size), or None.

        Unregistered memory, where that is allowed, is one run as large as the address space.
        """
        allocation = self.find(address, size)
        if allocation is not None:
            return allocation.words
        if not self.allow_unregistered or not _LOWEST_HOST <= address < _HIGHEST_HOST:
            return None
        if self._host is None:
            data = (ctypes.c_uint8 * (_HIGHEST_HOST - _LOWEST_HOST)).from_address(_LOWEST_HOST)
            self._host = Words(_LOWEST_HOST, np.ctypeslib.as_array(data))
        return self._host

    def load(self, addresses: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
        """Bytes (n, size) at n addresses."""
        low = int(addresses.min())
        allocation = self.find(low, int(addresses.max()) - low + size)
        if allocation is None:
            return np.stack([self.span(int(a), size) for a in addresses])
        offsets = addresses - allocation.base
        loaded: NDArray[np.uint8] = allocation.data[offsets[:, None] + np.arange(size)]
        return loaded

    def store(self, addresses: NDArray[np.int64], values: NDArray[np.uint8]) -> None:
        """Write bytes (n, size) at n addresses; of equal addresses the last wins."""
        size = values.shape[1]
        low = int(addresses.min())
        allocation = self.find(low, int(addresses.max()) - low + size)
        if allocation is None:
            for address, value in zip(addresses, values, strict=True):
                self.span(int(address), size)[:] = value
            return
        if not allocation.writable:
            raise ExecutionError(f"write to read-only memory {allocation.name}")
        offsets = addresses - allocation.base
        allocation.data[offsets[:, None] + np.arange(size)] = values
