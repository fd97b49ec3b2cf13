"""Where the elements of an operand matrix lie in shared memory, for every major-ness and swizzle.

Everything is counted in chunks of 16 bytes: start address, strides and swizzles move whole chunks.
A K-major matrix is rows of chunks along K, an MN-major one columns of chunks along MN.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors.shared_memory import Swizzle

CHUNK = 16
"""Bytes that stay together under every swizzle."""
PHASE = 1024
"""Swizzles repeat with the address every 1024 bytes or less."""
_PIECES_WORTH_MERGING = 2


class Major(Enum):
    """Along which dimension neighbours lie next to each other."""

    K = "K"
    MN = "MN"


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """The canonical layout of a matrix whose start address is known up to multiples of PHASE.

    Attributes:
        major, swizzle, leading, stride, base_offset: as in the descriptor (bytes).
        lines: rows (K-major) or columns (MN-major) of the matrix; chunks: 16-byte pieces of each.
        phase: start address modulo PHASE.
    """

    major: Major
    swizzle: Swizzle
    leading: int
    stride: int
    lines: int
    chunks: int
    phase: int = 0
    base_offset: int = 0


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Byte offsets of a matrix relative to its start address rounded down to PHASE."""

    chunks: NDArray[np.int64]
    """(lines, chunks): chunk numbers, offset / 16."""
    starts: NDArray[np.int64]
    """The same bytes as disjoint pieces of `size` bytes."""
    size: int
    end: int
    """Offset behind the last byte."""


def swizzle_bits(addresses: NDArray[np.int64], swizzle: Swizzle) -> NDArray[np.int64]:
    """What is XORed to shared addresses, by TMA as by matrix descriptors.

    32B, 64B and 128B change bits 4 to 6 by bits 7 to 9, 128B with 32-byte atoms bits 5, 6 by 7, 8.
    """
    if swizzle is Swizzle.NONE:
        return np.zeros_like(addresses)
    if swizzle is Swizzle.B128_ATOM_32B:
        return addresses >> 2 & 0x60
    return addresses >> 3 & (swizzle.span - 16)


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
    physical = addresses ^ swizzle_bits(pattern, layout.swizzle)
    starts, size = pieces(physical)
    for array in (physical, starts):
        array.flags.writeable = False
    chunks = physical >> 4
    chunks.flags.writeable = False
    return ChunkPlan(chunks, starts, size, int(physical.max()) + CHUNK)


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
    """Byte offset of every element (mn, k), relative to the start address rounded to PHASE."""
    chunks = chunk_plan(layout).chunks << 4
    within = np.arange(0, CHUNK, element_bytes, dtype=np.int64)
    offsets = (chunks[:, :, None] + within).reshape(layout.lines, -1)
    return offsets if layout.major is Major.K else np.ascontiguousarray(offsets.T)
