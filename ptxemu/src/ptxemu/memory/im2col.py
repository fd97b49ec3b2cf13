"""Copies in im2col mode: which pixels a column has, and where they are in global memory.

Recorded on an H200: positions run through the bounding box of each image, width first, from the
instruction's coordinates on, in steps of the element strides; the offsets are added to a position
without changing the box; pixels outside the tensor are filled, channels too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors.im2col_map import Im2colMap


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
