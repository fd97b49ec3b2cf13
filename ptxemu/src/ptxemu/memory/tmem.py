"""Tensor memory: addresses, where accumulators and scale factors lie, and the shapes of ld and st.

TMEM has 128 lanes of 512 columns of 32 bits. An address is lane << 16 | column.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptxemu.events import with_quick_members

LANES = 128
COLUMNS = 512
LANE_BYTES = COLUMNS * 4
PARTITION = 32
"""Lanes that one warp of a warpgroup can load and store."""

Index = NDArray[np.int64]


def split_address(address: int) -> tuple[int, int]:
    """Lane and column of a TMEM address."""
    return address >> 16 & 0xFFFF, address & 0xFFFF


@with_quick_members
class DataPath(Enum):
    """Layout of the rows of D and A on lanes (PTX ISA, "Data Path Layout Organization")."""

    A = "A"
    B = "B"
    D = "D"
    E = "E"
    F = "F"
    G = "G"

    @property
    def half_lanes(self) -> bool:
        """Only 16 of 32 lanes are used, so the lane alignment may be 0 or 16."""
        return self is DataPath.F

    @property
    def column_parts(self) -> int:
        """Groups of lanes that hold different columns of D."""
        return {DataPath.B: 2, DataPath.E: 2, DataPath.G: 4}.get(self, 1)


_DATA_PATHS = {
    (256, 2, False): DataPath.A,
    (128, 2, False): DataPath.B,
    (128, 1, False): DataPath.D,
    (128, 1, True): DataPath.D,
    (64, 1, True): DataPath.E,
    (64, 1, False): DataPath.F,
    (32, 1, True): DataPath.G,
}


def data_path(m: int, cta_group: int, ws: bool) -> DataPath | None:
    """The layout of a dense M x N tcgen05.mma; None where there is none."""
    return _DATA_PATHS.get((m, cta_group, ws))


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of D and A [row, row + count) lie on `count` lanes from `lane` on; of D only the
    columns [n, n + width), from the first column of D on."""

    lane: int
    count: int
    row: int
    n: int
    width: int


@lru_cache(maxsize=256)
def accumulator_blocks(path: DataPath, n: int) -> tuple[Block, ...]:
    """The blocks of one CTA's D with `n` columns, for a lane alignment of 0."""
    if path is DataPath.F:
        return tuple(Block(32 * q, 16, 16 * q, 0, n) for q in range(4))
    parts = path.column_parts
    count, width = LANES // parts, n // parts
    return tuple(Block(count * p, count, 0, width * p, width) for p in range(parts))


# ---- tcgen05.ld and tcgen05.st -----------------------------------------------------------------

REGISTERS_PER_REPEAT = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}
"""Registers of a thread that .x1 takes."""
MAX_REGISTERS = 128


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Lanes and columns relative to a TMEM address."""

    lane: int
    lanes: int
    column: int
    columns: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """Cells of the registers of a warp's tcgen05.ld or st, relative to the address.

    A packed register (.pack::16b, .unpack::16b) is the low halves of two columns; then `columns`
    is the first of the two.
    """

    lanes: Index
    """(registers, 32)"""
    columns: Index
    """(registers, 32)"""
    rectangles: tuple[Rectangle, ...]
    is_packed: bool


@lru_cache(maxsize=512)
def fragment(shape: str, repeat: int, is_packed: bool = False, split: int = 0) -> Fragment:
    """The cells of tcgen05.ld/st of `.shape.x<repeat>` (PTX ISA, "tcgen05.ld").

    Args:
        shape: 32x32b, 16x64b, 16x128b, 16x256b or 16x32bx2; split: the latter's immHalfSplitoff.
    """
    registers = repeat * REGISTERS_PER_REPEAT[shape]
    r = np.arange(registers, dtype=np.int64)[:, None]
    thread = np.arange(32, dtype=np.int64)[None, :]
    factor = 2 if is_packed else 1
    lanes, column = _unpacked(shape, r, thread)
    columns = factor * column
    if shape == "16x32bx2":
        columns = columns + split * (thread >= 16)
    lanes, columns = np.broadcast_to(lanes, columns.shape), columns
    width = int(factor * (column.max() + 1))
    height = 32 if shape == "32x32b" else 16
    rectangles: tuple[Rectangle, ...] = (Rectangle(0, height, 0, width),)
    if shape == "16x32bx2":
        rectangles = (Rectangle(0, 16, 0, width), Rectangle(0, 16, split, width))
    return Fragment(np.ascontiguousarray(lanes), columns, rectangles, is_packed)


def _unpacked(shape: str, r: Index, thread: Index) -> tuple[Index, Index]:
    """Lane and column of register r of each thread."""
    if shape == "32x32b":
        return thread, r + 0 * thread
    if shape == "16x64b":
        return thread // 4 + 8 * (thread % 2), thread // 2 % 2 + 2 * r
    if shape == "16x128b":
        return thread // 4 + 8 * (r % 2), thread % 4 + 4 * (r // 2)
    if shape == "16x256b":
        return thread // 4 + 8 * (r // 2 % 2), r % 2 + 2 * (thread % 4) + 8 * (r // 4)
    return thread % 16, r + 0 * thread


# ---- tcgen05.cp --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CopyShape:
    """A data movement shape of tcgen05.cp with its multicast."""

    rows: int
    bits: int
    lanes: Index
    """(copies, rows): the lanes that row r of the source goes to."""


def _lanes(rows: int, *copies: int) -> Index:
    return np.arange(rows, dtype=np.int64)[None, :] + np.array(copies, dtype=np.int64)[:, None]


def _lanes_01_23() -> Index:
    row = np.arange(64, dtype=np.int64)
    first = row % 32 + 64 * (row // 32)
    return np.stack([first, first + 32])


COPY_SHAPES: dict[tuple[str, str], CopyShape] = {
    ("128x256b", ""): CopyShape(128, 256, _lanes(128, 0)),
    ("128x128b", ""): CopyShape(128, 128, _lanes(128, 0)),
    ("4x256b", ""): CopyShape(4, 256, 32 * _lanes(4, 0)),
    ("64x128b", "warpx2::02_13"): CopyShape(64, 128, _lanes(64, 0, 64)),
    ("64x128b", "warpx2::01_23"): CopyShape(64, 128, _lanes_01_23()),
    ("32x128b", "warpx4"): CopyShape(32, 128, _lanes(32, 0, 32, 64, 96)),
}
"""Copy shapes by .shape and .multicast (PTX ISA, "tcgen05.cp")."""


# ---- scale factors -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScaleBlock:
    """Scale factors of rows [row, row + count): row r in column (r - row) // 32 and, of 32 lanes,
    lane (r - row) % 32; the same in every group of 32 lanes that starts at one of `lanes`."""

    row: int
    count: int
    lanes: tuple[int, ...]


def scale_blocks(rows: int, halves: bool) -> tuple[ScaleBlock, ...]:
    """Return the locations of the scale factors of `rows` rows of A or columns of B.

    Source: PTX ISA, "Block Scaling".

    Args:
        halves: B of data path B: the two halves of N have two groups of lanes each.
    """
    if not halves:
        return (ScaleBlock(0, rows, (0, 32, 64, 96)),)
    half = rows // 2
    return (ScaleBlock(0, half, (0, 32)), ScaleBlock(half, half, (64, 96)))
