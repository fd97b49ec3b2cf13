"""Tiles: which bytes of global memory the box of a tensor map covers, and where rows of it land."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors.matrix_layout import CHUNK, pieces
from ptxemu.descriptors.swizzle import PERIOD, Swizzle, swizzled
from ptxemu.descriptors.tensor_map import TensorMap


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a box that lies inside the tensor; dimensions are listed outermost first.

    Attributes:
        start: address of its first byte.
        shape: elements along each dimension but the innermost, whose last entry is bytes of a row.
        strides: bytes between neighbours along each dimension, 1 for the last.
        within: where it lies in the box: slices of rows, and of bytes for the innermost.
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    within: tuple[slice, ...]

    @property
    def extent(self) -> int:
        """Bytes from the first one to the last."""
        spans = zip(self.shape, self.strides, strict=True)
        return sum((count - 1) * stride for count, stride in spans) + 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.shape[-1]

    @property
    def is_contiguous(self) -> bool:
        """Whether the rows follow one another without gaps."""
        expected = 1
        for count, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if count > 1 and stride != expected:
                return False
            expected *= count
        return True

    @property
    def may_overlap(self) -> bool:
        """Whether two of its rows may share bytes."""
        spans = sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1)
        reached = 1
        for stride, count in spans:
            if stride < reached:
                return True
            reached += (count - 1) * stride
        return False

    def row_starts(self) -> NDArray[np.int64]:
        """Address of each row."""
        starts = np.full((1,) * (len(self.shape) - 1), self.start, dtype=np.int64)
        for axis, (count, stride) in enumerate(
            zip(self.shape[:-1], self.strides[:-1], strict=True)
        ):
            along = np.arange(count, dtype=np.int64) * stride
            starts = starts + along.reshape([-1 if a == axis else 1 for a in range(starts.ndim)])
        return starts.reshape(-1)


def box_shape(tensor_map: TensorMap) -> tuple[int, ...]:
    """Rows along each dimension but the innermost, outermost first, and bytes of a row."""
    return (*reversed(tensor_map.landed[1:]), tensor_map.row_bytes)


def clip(tensor_map: TensorMap, coordinates: Sequence[int]) -> Tile | None:
    """The part of the box at `coordinates` (innermost first) inside the tensor; None: nothing."""
    bits = tensor_map.element_bits
    inner = coordinates[0]
    low, high = max(0, -inner), min(tensor_map.box[0], tensor_map.dims[0] - inner)
    if high <= low:
        return None
    start = tensor_map.address + (inner + low) * bits // 8
    shape, strides = [(high - low) * bits // 8], [1]
    within = [slice(low * bits // 8, high * bits // 8)]
    for k in range(1, tensor_map.rank):
        at, step = coordinates[k], tensor_map.element_strides[k]
        low = max(0, -(at // step))
        high = min(tensor_map.landed[k], -(-(tensor_map.dims[k] - at) // step))
        if high <= low:
            return None
        stride = tensor_map.strides[k - 1]
        start += (at + low * step) * stride
        shape.append(high - low)
        strides.append(step * stride)
        within.append(slice(low, high))
    return Tile(start, tuple(shape[::-1]), tuple(strides[::-1]), tuple(within[::-1]))


def clip_rows(tensor_map: TensorMap, column: int, rows: Sequence[int]) -> list[Tile | None]:
    """The part inside the tensor of each of four rows of a matrix (tile::gather4, scatter4)."""
    return [clip(tensor_map, (column, row)) for row in rows]


@dataclass(frozen=True, slots=True)
class Landing:
    """Locations of `rows` rows in shared memory, relative to their start rounded down to PERIOD.

    Attributes:
        units: the number of each unit of `unit` bytes of every row, in order.
        starts, size: the bytes that are written, as disjoint pieces.
        end: offset after the last byte.
        is_linear: the rows are one range that starts at starts[0].
    """

    unit: int
    units: NDArray[np.int64]
    starts: NDArray[np.int64]
    size: int
    end: int
    is_linear: bool


@lru_cache(maxsize=1024)
def landing(row_bytes: int, rows: int, pitch: int, swizzle: Swizzle, phase: int) -> Landing:
    """Return the landing of rows whose first byte is at a multiple of PERIOD plus `phase`."""
    unit = 8 if swizzle is Swizzle.B128_ATOM_32B_FLIP_8B else CHUNK
    row = phase + np.arange(rows, dtype=np.int64)[:, None] * pitch
    places = (row + np.arange(0, row_bytes, unit, dtype=np.int64)).reshape(-1)
    if swizzle is Swizzle.NONE and pitch == row_bytes:
        starts, size = np.array([phase], dtype=np.int64), rows * row_bytes
        return Landing(unit, places >> 4, starts, size, phase + size, True)
    places = swizzled(places, swizzle)
    starts, size = pieces(np.unique(places & -CHUNK))
    units = places >> (unit.bit_length() - 1)
    for array in (units, starts):
        array.flags.writeable = False
    return Landing(unit, units, starts, size, int(starts.max()) + size, False)


assert PERIOD % CHUNK == 0
