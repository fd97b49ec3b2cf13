"""Short names of the NumPy types that lanes are viewed as, and constants of them."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

U1 = np.dtype(np.uint8)
U2 = np.dtype(np.uint16)
U4 = np.dtype(np.uint32)
U8 = np.dtype(np.uint64)
I1 = np.dtype(np.int8)
I2 = np.dtype(np.int16)
I4 = np.dtype(np.int32)
I8 = np.dtype(np.int64)
F2 = np.dtype(np.float16)
F4 = np.dtype(np.float32)
F8 = np.dtype(np.float64)


def constant(value: float, dtype: np.dtype[Any]) -> Array:
    """A number as an array of no dimensions, which NumPy combines faster than a scalar."""
    array = np.array(value, dtype=dtype)
    array.flags.writeable = False
    return array


def split(values: Array, dtype: np.dtype[Any]) -> Array:
    """Packed elements: each value's parts of a narrower type, the lowest first."""
    return np.ascontiguousarray(values).view(dtype)


def join(low: Array, high: Array, dtype: np.dtype[Any]) -> Array:
    """Two arrays of equal type packed pairwise into values of twice the width."""
    parts = np.empty(2 * low.size, low.dtype)
    parts[0::2] = low
    parts[1::2] = high
    return parts.view(dtype)


def has_nan(values: Array) -> bool:
    """Whether a number is NaN: squares of anything else add up to a number or to infinity."""
    flat = values.ravel()
    total = flat.dot(flat)
    return bool(total != total)


def interleave(low: Array, high: Array) -> Array:
    """low[0], high[0], low[1], high[1]..."""
    parts = np.empty(2 * low.size, low.dtype)
    parts[0::2] = low
    parts[1::2] = high
    return parts
