"""Bank conflicts of a warp's access to shared memory.

32 banks of 4 bytes. Lanes that want different words of one bank are served one after another; lanes
that want the same word share it. Accesses of 8 bytes go in two half-warps, of 16 bytes in four
quarter-warps; ldmatrix and stmatrix in matrices of eight 16-byte rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptxemu.machine.lanes import WARP_SIZE

NUM_BANKS = 32
BANK_BYTES = 4


@dataclass(frozen=True, slots=True)
class Wavefronts:
    """Wavefronts of shared memory for one instruction."""

    needed: int
    """Phases that have active lanes: what it takes with no conflict."""
    taken: int

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond what was needed."""
        return self.taken - self.needed


def wavefronts(starts: NDArray[np.int64], size: int, lanes: NDArray[np.intp]) -> Wavefronts:
    """Return the wavefronts of one access.

    Args:
        starts: first byte of each active lane's piece; of each row for a matrix access.
        size: bytes of each piece.
        lanes: lane of each piece; number of the row for a matrix access.
    """
    per_phase = min(WARP_SIZE, NUM_BANKS * BANK_BYTES // max(size, BANK_BYTES))
    phases = lanes // per_phase
    needed = taken = 0
    words_per_piece = max(1, size // BANK_BYTES)
    for phase in np.unique(phases):
        first = starts[phases == phase] // BANK_BYTES
        words = np.unique(first[:, None] + np.arange(words_per_piece))
        needed += 1
        taken += int(np.bincount(words % NUM_BANKS).max())
    return Wavefronts(needed, taken)
