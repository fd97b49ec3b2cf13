"""Bytes whose values depend on the order of floating-point additions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.events import Access, AccessKind, Observer, Space

_MAYBE_FLOAT = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "tensor"))


class FloatSums(Observer):
    """Notes where a run adds floating-point numbers to global memory, by atomics or reductions."""

    def __init__(self) -> None:
        self._added: list[tuple[NDArray[np.int64], int]] = []
        """First bytes of the pieces of an access, and the bytes of each."""

    def accessed(self, access: Access) -> None:
        if access.kind is AccessKind.ATOMIC and access.space is Space.GLOBAL:
            modifiers = access.instruction.modifiers
            # The type of a tensor's elements stands in its map, not in the instruction.
            if "add" in modifiers and not _MAYBE_FLOAT.isdisjoint(modifiers):
                self._added.append((access.starts.copy(), access.size))

    def is_exact(self, base: int, size: int) -> NDArray[np.bool_]:
        """Return for each byte of an array whether at most one number was added to it.

        After several additions the last bits depend on their order, which the schedule decides.
        """
        count = np.zeros(size, dtype=np.int64)
        for starts, piece in self._added:
            places = (starts[:, None] - base + np.arange(piece)).ravel()
            np.add.at(count, places[(places >= 0) & (places < size)], 1)
        return count <= 1
