"""Free memory that the C library keeps, given back to the system.

A kept call is small and stays in the heap, between large tensors that do not. The next call's, of
other sizes, do not fit between such, and thousands of new sizes took gigabytes.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

LOOK_BYTES = 1 << 26
"""Bytes of tensors in the heap, of new calls, after which the process's memory is looked at."""
GROWTH_BYTES = 200 << 20
"""Growth of the process's memory after which free memory is given back: pages that are used again
afterwards cost time."""


class Heap:
    """The process's heap, as far as kept calls pin it."""

    def __init__(self) -> None:
        """Begin to count."""
        self._bytes = 0
        self._resident: int | None = None

    def note(self, num_bytes: int) -> None:
        """A new call had so many bytes of tensors in the heap, and something of it was kept."""
        self._bytes += num_bytes
        if self._bytes < LOOK_BYTES:
            return
        self._bytes = 0
        resident = resident_bytes()
        if self._resident is not None and resident > self._resident + GROWTH_BYTES:
            give_back()
            self._resident = resident_bytes()
        elif self._resident is None or resident < self._resident:
            self._resident = resident


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Have the C library return free pages to the system, if it can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


heap = Heap()
"""The only one."""
