"""Swizzles of tensor maps and matrix descriptors: which shared address a byte of a tile goes to."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

PERIOD = 1024
"""Every pattern repeats with this period of the shared address."""


class Swizzle(IntEnum):
    """Swizzling modes (CUtensorMapSwizzle; PTX ISA, "Shared Memory Layout and Swizzling").

    B32, B64 and B128 permute 16-byte chunks within rows of 32, 64 and 128 bytes; the ATOM modes
    permute larger chunks within rows of 128 bytes, FLIP_8B also swaps the 8-byte halves of every
    16 bytes in odd rows. None was checked on hardware beyond B128: an H200 has no other.
    """

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6

    @property
    def span(self) -> int:
        """Bytes of the rows within which chunks move; 16 without swizzle."""
        return _SPANS[self]

    @property
    def mode(self) -> int:
        """The span as hardware encodes it: 0 none, 1, 2, 3 for 32, 64, 128 bytes."""
        return min(self, Swizzle.B128)

    @property
    def atomicity(self) -> int:
        """The chunk as hardware encodes it: 0 16 B, 1 32 B, 2 32 B with flip, 3 64 B."""
        return max(self - Swizzle.B128, 0)

    @classmethod
    def of(cls, mode: int, atomicity: int) -> Swizzle:
        """The swizzle of a hardware mode and atomicity (which only the 128-byte mode has)."""
        return cls(mode + atomicity if mode == cls.B128 else mode)


_SPANS = {
    Swizzle.NONE: 16,
    Swizzle.B32: 32,
    Swizzle.B64: 64,
    **dict.fromkeys(tuple(Swizzle)[Swizzle.B128 :], 128),
}


def swizzled(addresses: NDArray[np.int64], swizzle: Swizzle) -> NDArray[np.int64]:
    """Return the swizzled addresses of bytes: bits of a shared address select the chunk.

    Bits 7 and up number the rows of 128 bytes. B32, B64 and B128 XOR bit 7, bits 7-8, bits 7-9
    into the bits from 4 on; the atoms of 32 and 64 bytes XOR bits 7-8 into 5-6, and 7 into 6.
    """
    if swizzle is Swizzle.NONE:
        return addresses
    if swizzle is Swizzle.B128_ATOM_64B:
        return addresses ^ ((addresses >> 1) & 0x40)
    if swizzle is Swizzle.B128_ATOM_32B:
        return addresses ^ ((addresses >> 2) & 0x60)
    if swizzle is Swizzle.B128_ATOM_32B_FLIP_8B:
        return addresses ^ ((addresses >> 2) & 0x60) ^ ((addresses >> 4) & 0x08)
    return addresses ^ ((addresses >> 3) & (swizzle.span - 16))
