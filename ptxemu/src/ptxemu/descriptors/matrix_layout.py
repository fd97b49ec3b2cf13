"""Positions of an operand matrix's elements in shared memory, for every major-ness and swizzle.

Everything is counted in chunks of 16 bytes: start address, strides and swizzles move whole chunks.
A K-major matrix is rows of chunks along K, an MN-major one columns of chunks along MN.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors.shared_memory import Tcgen05Descriptor, WgmmaDescriptor
from ptxemu.descriptors.swizzle import PERIOD, Swizzle, swizzled
from ptxemu.events import with_quick_members

CHUNK = 16
"""Bytes that stay together under every swizzle."""
_PIECES_WORTH_MERGING = 2


@with_quick_members
class Major(Enum):
    """Along which dimension neighbours lie next to each other."""

    K = "K"
    MN = "MN"


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """The canonical layout of a matrix whose start address is known up to multiples of PERIOD.

    Attributes:
        major, swizzle, leading, stride, base_offset: as in the descriptor (bytes).
        lines: rows (K-major) or columns (MN-major) of the matrix; chunks: 16-byte pieces of each.
        phase: start address modulo PERIOD.
    """

    major: Major
    swizzle: Swizzle
    leading: int
    stride: int
    lines: int
    chunks: int
    phase: int = 0
    base_offset: int = 0

    @classmethod
    def of(
        cls, descriptor: WgmmaDescriptor | Tcgen05Descriptor, major: Major, lines: int, chunks: int
    ) -> MatrixLayout:
        """The layout that a descriptor names."""
        return cls(
            major,
            descriptor.swizzle,
            descriptor.leading_dimension_byte_offset,
            descriptor.stride_dimension_byte_offset,
            lines,
            chunks,
            descriptor.start_address % PERIOD,
            descriptor.base_offset,
        )


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Byte offsets of a matrix relative to its start address rounded down to PERIOD."""

    chunks: NDArray[np.int64]
    """(lines, chunks): chunk numbers, offset / 16, contiguous."""
    starts: NDArray[np.int64]
    """The same bytes as disjoint pieces of `size` bytes."""
    size: int
    end: int
    """Offset after the last byte."""
    address: int
    """Address of `chunks`, for machine code."""


def linear_offsets(layout: MatrixLayout) -> NDArray[np.int64]:
    """Chunk offsets (lines, chunks) in bytes before swizzling, from the start address."""
    line = np.arange(layout.lines, dtype=np.int64)[:, None]
    chunk = np.arange(layout.chunks, dtype=np.int64)[None, :]
    span, leading, stride = layout.swizzle.span, layout.leading, layout.stride
    if layout.major is Major.K:
        along = chunk * leading if layout.swizzle is Swizzle.NONE else chunk * CHUNK
        return line % 8 * span + line // 8 * stride + along
    if layout.swizzle is Swizzle.NONE:
        return chunk * stride + line % 8 * CHUNK + line // 8 * leading
    lines_per_atom = 4 if layout.swizzle is Swizzle.B128_ATOM_32B else 8
    per_line = span // CHUNK
    within = chunk % per_line * CHUNK + chunk // per_line * leading
    return within + line % lines_per_atom * span + line // lines_per_atom * stride


@lru_cache(maxsize=4096)
def chunk_plan(layout: MatrixLayout) -> ChunkPlan:
    """The chunks of a matrix, swizzled."""
    addresses = layout.phase + linear_offsets(layout)
    pattern = addresses - (layout.base_offset << 7)
    physical = addresses ^ pattern ^ swizzled(pattern, layout.swizzle)
    starts, size = pieces(physical)
    for array in (physical, starts):
        array.flags.writeable = False
    chunks = np.ascontiguousarray(physical >> 4)
    chunks.flags.writeable = False
    end = int(physical.max()) + CHUNK
    return ChunkPlan(chunks, starts, size, end, int(chunks.ctypes.data))


def pieces(chunk_offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Chunk offsets as the fewest disjoint pieces of one common size: their starts, the size."""
    ordered = np.unique(chunk_offsets)
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 2 * CHUNK) != CHUNK)
    lengths = np.diff(first, append=len(ordered))
    common = int(np.gcd.reduce(lengths))
    if common < _PIECES_WORTH_MERGING:
        return ordered, CHUNK
    return np.ascontiguousarray(ordered.reshape(-1, common)[:, 0]), common * CHUNK


def element_offsets(layout: MatrixLayout, element_bytes: int) -> NDArray[np.int64]:
    """Byte offset of every element (mn, k), relative to the start address rounded to PERIOD."""
    chunks = chunk_plan(layout).chunks << 4
    within = np.arange(0, CHUNK, element_bytes, dtype=np.int64)
    offsets = (chunks[:, :, None] + within).reshape(layout.lines, -1)
    return offsets if layout.major is Major.K else np.ascontiguousarray(offsets.T)
