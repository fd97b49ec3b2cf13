"""NaN results: for f32 and halves the hardware has one, whatever the operands' payloads were.

Measured on an H200: every arithmetic instruction on f32, f16 and bf16 gives it, abs and neg too.
f64 instead keeps an operand's payload, with its quiet bit set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ptxemu.numerics.dtypes import F8, U2, U4, U8, Array, constant, has_nan

_NAN_F32 = constant(0x7FFFFFFF, U4)
_NAN_F16 = constant(0x7FFF, U2)
_INVALID = constant(0xFFF8 << 48, U8)
_QUIET = constant(1 << 51, U8)


def bits_of_f32(values: Array) -> Array:
    """The bits (uint32) of float32 results."""
    bits = values.view(U4)
    return np.where(values != values, _NAN_F32, bits) if has_nan(values) else bits


def bits_of_f16(values: Array) -> Array:
    """The bits (uint16) of float16 results."""
    nan = values != values
    bits = values.view(U2)
    return np.where(nan, _NAN_F16, bits) if np.count_nonzero(nan) else bits


def quieted(values: Array) -> Array:
    """float64 with the quiet bit of every NaN set."""
    result: Array = values * 1.0
    return result


def of_operand(function: Callable[..., Any], order: Sequence[int]) -> Callable[..., Array]:
    """A float64 function whose NaN results are an operand's, its quiet bit set.

    Args:
        order: operands by precedence; where none of them is NaN the result is 0xfff8000000000000.
    """

    def apply(*operands: Array) -> Array:
        result: Array = function(*operands)
        nan = result != result
        if not np.count_nonzero(nan):
            return result
        bits: Array = _INVALID
        for operand in [operands[index] for index in reversed(order)]:
            bits = np.where(operand != operand, operand.view(U8) | _QUIET, bits)
        return np.where(nan, bits, result.view(U8)).view(F8)

    return apply
