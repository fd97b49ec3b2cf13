"""Blocks of memory that stand for a GPU's, also those that no tensor has any more.

torch's CUDA allocator unmaps nothing that is freed, so a kernel that still uses it runs there; the
latest blocks are kept here for that.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

KEPT_BYTES = 256 << 20
"""Maximum bytes kept of the memory that was requested last."""

_known: weakref.WeakValueDictionary[int, NDArray[np.uint8]] = weakref.WeakValueDictionary()
"""Blocks by address, as long as a tensor has them or they are kept."""
_kept: deque[NDArray[np.uint8]] = deque()


def add(block: NDArray[np.uint8]) -> None:
    """A tensor gets this memory."""
    _known[int(block.ctypes.data)] = block
    _kept.append(block)
    total = sum(kept.nbytes for kept in _kept)
    while total > KEPT_BYTES:
        total -= _kept.popleft().nbytes


def is_start(address: int) -> bool:
    """Whether a block starts there."""
    return address in _known


def kept_at(address: int) -> NDArray[np.uint8] | None:
    """The kept block that `address` is in."""
    for block in _kept:
        start = int(block.ctypes.data)
        if start <= address < start + block.nbytes:
            return block
    return None
