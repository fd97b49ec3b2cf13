"""Matrix descriptors: where and how a matrix lies in shared memory (64 bits)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ptxemu.descriptors.bits import put, take
from ptxemu.descriptors.swizzle import Swizzle

_ADDRESS_MASK = 0x3FFFF


_WGMMA_MODES = {0: Swizzle.NONE, 1: Swizzle.B128, 2: Swizzle.B64, 3: Swizzle.B32}
_TCGEN05_MODES = {
    0: Swizzle.NONE,
    1: Swizzle.B128_ATOM_32B,
    2: Swizzle.B128,
    4: Swizzle.B64,
    6: Swizzle.B32,
}
_WGMMA_CODES = {mode: code for code, mode in _WGMMA_MODES.items()}
_TCGEN05_CODES = {mode: code for code, mode in _TCGEN05_MODES.items()}


def _matrix_encode(byte_count: int, low: int, name: str) -> int:
    """The ISA's matrix-descriptor-encode, (x & 0x3FFFF) >> 4, at bit `low`."""
    if byte_count % 16:
        raise ValueError(f"{name}: expected a multiple of 16 bytes; got {byte_count}")
    return (byte_count & _ADDRESS_MASK) >> 4 << low


@dataclass(frozen=True, slots=True)
class WgmmaDescriptor:
    """The matrix descriptor of wgmma (PTX ISA, "Matrix Descriptor Format").

    Attributes:
        start_address: CTA-relative byte offset of the matrix, 18 bits, a multiple of 16.
        leading_dimension_byte_offset, stride_dimension_byte_offset: LBO and SBO, in bytes.
        base_offset: which row of the swizzle pattern the pattern starts with, 0 to 7.
        swizzle: the swizzling mode.
    """

    start_address: int
    leading_dimension_byte_offset: int
    stride_dimension_byte_offset: int
    swizzle: Swizzle = Swizzle.NONE
    base_offset: int = 0

    @classmethod
    @lru_cache(maxsize=4096)
    def decode(cls, value: int) -> WgmmaDescriptor:
        """The fields of a 64-bit descriptor; bits that have no meaning are dropped."""
        return cls(
            take(value, 0, 14) << 4,
            take(value, 16, 14) << 4,
            take(value, 32, 14) << 4,
            _WGMMA_MODES[take(value, 62, 2)],
            take(value, 49, 3),
        )

    def encode(self) -> int:
        """The 64-bit descriptor.

        Raises:
            ValueError: a field does not fit, or wgmma has no such swizzling mode.
        """
        if self.swizzle not in _WGMMA_CODES:
            raise ValueError(f"swizzle: wgmma has no mode {self.swizzle.name}")
        return (
            _matrix_encode(self.start_address, 0, "start_address")
            | _matrix_encode(self.leading_dimension_byte_offset, 16, "leading_dimension")
            | _matrix_encode(self.stride_dimension_byte_offset, 32, "stride_dimension")
            | put(self.base_offset, 49, 3, "base_offset")
            | put(_WGMMA_CODES[self.swizzle], 62, 2, "swizzle")
        )


@dataclass(frozen=True, slots=True)
class Tcgen05Descriptor:
    """The shared memory descriptor of tcgen05 (PTX ISA, "Shared memory descriptor").

    Attributes:
        start_address: CTA-relative byte offset of the matrix, 18 bits, a multiple of 16.
        leading_dimension_byte_offset, stride_dimension_byte_offset: LBO and SBO, in bytes.
        base_offset: which row of the swizzle pattern the pattern starts with, 0 to 7.
        swizzle: the swizzling mode.
        leading_dimension_is_absolute: the leading dimension's stride mode (sm_103 only).
        fixed: bits 46 to 48, which must be 0b001.
        reserved: bits 53 to 60, which must be 0.
    """

    start_address: int
    leading_dimension_byte_offset: int
    stride_dimension_byte_offset: int
    swizzle: Swizzle = Swizzle.NONE
    base_offset: int = 0
    leading_dimension_is_absolute: bool = False
    fixed: int = 0b001
    reserved: int = 0

    @classmethod
    @lru_cache(maxsize=4096)
    def decode(cls, value: int) -> Tcgen05Descriptor:
        """The fields of a 64-bit descriptor.

        Raises:
            ValueError: the swizzling mode is one of the invalid values 3, 5 and 7.
        """
        code = take(value, 61, 3)
        if code not in _TCGEN05_MODES:
            raise ValueError(f"swizzling mode: expected 0, 1, 2, 4 or 6; got {code}")
        return cls(
            take(value, 0, 14) << 4,
            take(value, 16, 14) << 4,
            take(value, 32, 14) << 4,
            _TCGEN05_MODES[code],
            take(value, 49, 3),
            bool(take(value, 52, 1)),
            take(value, 46, 3),
            take(value, 53, 8),
        )

    def encode(self) -> int:
        """The 64-bit descriptor.

        Raises:
            ValueError: a field does not fit, or tcgen05 has no such swizzling mode.
        """
        if self.swizzle not in _TCGEN05_CODES:
            raise ValueError(f"swizzle: tcgen05 has no mode {self.swizzle.name}")
        return (
            _matrix_encode(self.start_address, 0, "start_address")
            | _matrix_encode(self.leading_dimension_byte_offset, 16, "leading_dimension")
            | _matrix_encode(self.stride_dimension_byte_offset, 32, "stride_dimension")
            | put(self.fixed, 46, 3, "fixed")
            | put(self.base_offset, 49, 3, "base_offset")
            | put(int(self.leading_dimension_is_absolute), 52, 1, "leading_dimension_mode")
            | put(self.reserved, 53, 8, "reserved")
            | put(_TCGEN05_CODES[self.swizzle], 61, 3, "swizzle")
        )

    def problems(self) -> list[str]:
        """Return what the ISA forbids in the fields, in words."""
        found = []
        if self.fixed != 0b001:
            found.append(f"bits 46-48 must be 0b001; got 0b{self.fixed:03b}")
        if self.reserved:
            found.append(f"bits 53-60 must be 0; got 0x{self.reserved:x}")
        if self.leading_dimension_is_absolute:
            found.append("bit 52 (absolute leading dimension) needs sm_103a")
        return found
