"""Minimum and maximum of floats as PTX defines them, for float16, float32 and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxemu.numerics.dtypes import F2, F4, F8, U2, U4, U8, Array

_BITS: dict[np.dtype[Any], np.dtype[Any]] = {F2: U2, F4: U4, F8: U8}
_CANONICAL_NAN: dict[np.dtype[Any], np.floating[Any]] = {
    F2: U2.type(0x7FFF).view(np.float16),
    F4: U4.type(0x7FFFFFFF).view(np.float32),
    F8: U8.type(0x7FFFFFFFFFFFFFFF).view(np.float64),
}
Function = Callable[..., Array]


def minimum(a: Array, b: Array) -> Array:
    """The smaller number, -0 being below +0; NaN only of two NaN."""
    result: Array = np.fmin(a, b)
    if np.count_nonzero(result) != result.size:
        result = _with_zeros(a, b, result, np.bitwise_or)
    return result


def maximum(a: Array, b: Array) -> Array:
    """The larger number, -0 being below +0; NaN only of two NaN."""
    result: Array = np.fmax(a, b)
    if np.count_nonzero(result) != result.size:
        result = _with_zeros(a, b, result, np.bitwise_and)
    return result


def _with_zeros(a: Array, b: Array, result: Array, combine: Callable[..., Array]) -> Array:
    """Combine the signs where both operands are zeros: or for the minimum, and for the maximum."""
    bits = _BITS[a.dtype]
    zeros = combine(a.view(bits), b.view(bits)).view(a.dtype)
    return np.where((a == 0) & (b == 0), zeros, result)


def propagating(function: Function) -> Function:
    """The same with the canonical NaN wherever an operand is NaN (.NaN)."""

    def apply(a: Array, b: Array) -> Array:
        nan = (a != a) | (b != b)
        result = function(a, b)
        return np.where(nan, _CANONICAL_NAN[a.dtype], result) if np.count_nonzero(nan) else result

    return apply


def of_magnitudes(function: Function, *, xors: bool) -> Function:
    """The same of absolute values (.abs), signed with the xor of the signs (.xorsign.abs)."""

    def apply(*operands: Array) -> Array:
        result = function(*map(np.abs, operands))
        if not xors:
            return result
        a, b = operands
        negative = np.signbit(a) ^ np.signbit(b)
        return np.where(negative & (result == result), -result, result)

    return apply
