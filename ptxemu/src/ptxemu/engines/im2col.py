"""A column of pixels as source or target of a tensor copy in im2col mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors.tensor_map import Im2colMap
from ptxemu.engines.copy_operation import Bytes, holds, readable, report_async, writable
from ptxemu.engines.tma import filler, report_map_read, rounded_tf32
from ptxemu.errors import fault
from ptxemu.events import AccessKind

if TYPE_CHECKING:
    from ptxemu.engines.copy_operation import Combine
    from ptxemu.machine.state import AsyncOperation
    from ptxemu.syntax.ast import Instruction


# Copies in im2col mode: which pixels a column has, and where they are in global memory.
#
# Recorded on an H200: positions run through the bounding box of each image, width first, from the
# instruction's coordinates on, in steps of the element strides; the offsets are added to a position
# without changing the box; pixels outside the tensor are filled, channels too.


@lru_cache(maxsize=1024)
def positions(made: Im2colMap, start: tuple[int, ...]) -> NDArray[np.int64]:
    """Positions (pixels, dimensions but the first) from `start` on, the image last."""
    found = np.empty((made.pixels, made.rank - 1), np.int64)
    at, last, steps = list(start), made.last, made.element_strides[1:]
    for pixel in range(made.pixels):
        found[pixel] = at
        for axis, end in enumerate(last):
            at[axis] += steps[axis]
            if at[axis] <= end:
                break
            at[axis] = made.lower[axis]
        else:
            at[-1] += steps[-1]
    found.flags.writeable = False
    return found


def column(
    made: Im2colMap, coordinates: Sequence[int], offsets: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.intp], slice]:
    """The part of a column inside the tensor.

    Args:
        coordinates: channel, position and image; offsets: of the position.

    Returns:
        Addresses of pixels' first bytes, their numbers, and which bytes of each pixel they are.
    """
    first, *start = coordinates
    places = positions(made, tuple(start)) + np.array([*offsets, 0])
    inside = ((places >= 0) & (places < np.array(made.dims[1:]))).all(axis=1)
    pixels = np.flatnonzero(inside)
    size = made.element_bits // 8
    low, high = max(0, -first), min(made.box[0], made.dims[0] - first)
    if high <= low:
        pixels = pixels[:0]
    starts = made.address + (first + low) * size
    addresses = starts + places[pixels] @ np.array(made.strides, np.int64)
    return addresses, pixels, slice(low * size, max(high, low) * size)


@dataclass(frozen=True, slots=True)
class GlobalColumn:
    """The pixels of a tensor from some coordinates on.

    Attributes:
        coordinates: channel, width, height, depth (as far as there), image.
        offsets: of width, height and depth.
        map_address: where the map was read.
    """

    tensor_map: Im2colMap
    coordinates: tuple[int, ...]
    offsets: tuple[int, ...]
    map_address: int

    @property
    def rows(self) -> int:
        """Number of pixels."""
        return self.tensor_map.pixels

    @property
    def size(self) -> int:
        """Bytes, those outside the tensor included."""
        return self.rows * self.tensor_map.row_bytes

    def check(self, instruction: Instruction, *, writes: bool) -> None:
        """Refuse coordinates that hardware refuses (recorded on an H200).

        The position must lie in the bounding box; of a store the box must lie in the tensor.
        """
        made = self.tensor_map
        if len(self.coordinates) != made.rank:
            message = f"{len(self.coordinates)} coordinates; the tensor map's rank is {made.rank}"
            fault(instruction, message)
        trap = "(CUDA_ERROR_ILLEGAL_INSTRUCTION)"
        if self.coordinates[0] * made.element_bits % 128:
            fault(
                instruction,
                f"channel {self.coordinates[0]} of {made.dtype} is no multiple of 16 bytes {trap}",
            )
        position = self.coordinates[1:-1]
        bounds = zip(made.lower, position, made.last, strict=True)
        if not all(low <= at <= last for low, at, last in bounds):
            fault(
                instruction,
                f"position {position} is outside the bounding box {made.lower} to {made.last} "
                + trap,
            )
        if writes and (min(made.lower) < 0 or max(made.upper) > 0 or self.coordinates[-1] < 0):
            fault(
                instruction,
                f"a store whose bounding box {made.lower} to {made.last} of image "
                f"{self.coordinates[-1]} is not all in the tensor {trap}",
            )

    def read(self, operation: AsyncOperation) -> Bytes:
        """The pixels, filled where they are outside the tensor."""
        report_map_read(operation, self.map_address)
        addresses, pixels, part = column(self.tensor_map, self.coordinates, self.offsets)
        data = filler(self.tensor_map, (self.rows, self.tensor_map.row_bytes))
        count = part.stop - part.start
        rounds = self.tensor_map.dtype.startswith("tf32")
        for address, pixel in zip(addresses.tolist(), pixels.tolist(), strict=True):
            held = readable(operation, address, count)
            data[pixel, part] = rounded_tf32(held) if rounds else held
        report_async(operation, None, np.unique(addresses), count, AccessKind.READ)
        return data

    def write(self, operation: AsyncOperation, data: Bytes) -> None:
        """Replace the pixels that are inside the tensor."""
        report_map_read(operation, self.map_address)
        addresses, pixels, part = column(self.tensor_map, self.coordinates, self.offsets)
        rows = data.reshape(self.rows, -1)
        count, is_silent = part.stop - part.start, True
        for address, pixel in zip(addresses.tolist(), pixels.tolist(), strict=True):
            held = writable(operation, address, count)
            is_silent = is_silent and holds(operation, held, rows[pixel, part])
            held[:] = rows[pixel, part]
        report_async(
            operation, None, np.unique(addresses), count, AccessKind.WRITE, is_silent=is_silent
        )

    def update(self, operation: AsyncOperation, data: Bytes, combine: Combine) -> None:
        """Combine the pixels inside the tensor with `data`."""
        report_map_read(operation, self.map_address)
        addresses, pixels, part = column(self.tensor_map, self.coordinates, self.offsets)
        rows, count = data.reshape(self.rows, -1), part.stop - part.start
        for address, pixel in zip(addresses.tolist(), pixels.tolist(), strict=True):
            held = writable(operation, address, count)
            held[:] = combine(held.copy(), np.ascontiguousarray(rows[pixel, part]))
        element = self.tensor_map.dtype
        report_async(
            operation, None, np.unique(addresses), count, AccessKind.ATOMIC, element=element
        )
