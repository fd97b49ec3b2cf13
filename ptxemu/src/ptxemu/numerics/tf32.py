"""tf32: a float32 whose last 13 bits are zero."""

from __future__ import annotations

import numpy as np

from ptxemu.numerics.dtypes import F4, U4, Array, constant

_NAN = constant(0x7FFFFFFF, U4)
_KEPT = constant(0xFFFFE000, U4)
_HALF = constant(0x1000, U4)
_BELOW_HALF = constant(0x0FFF, U4)
_THIRTEEN = constant(13, U4)
_ONE = constant(1, U4)
_SIGN = constant(0x80000000, U4)
_LAST = constant(0x2000, U4)
_LARGEST = constant(0x7F7FE000, U4)
_MAGNITUDE = constant(0x7FFFFFFF, U4)
_ZERO = constant(0, U4)


def narrow(values: Array, mode: str, *, satfinite: bool = False, relu: bool = False) -> Array:
    """float32 rounded to tf32, as float32.

    Args:
        mode: rna (ties away from zero), rn or rz.
        satfinite: beyond the largest number, and infinity, become the largest.
        relu: negative numbers become +0.

    NaN becomes the canonical one, cut. H200: with rna it keeps the rest of its payload, which may
    be nothing; and satfinite gives the code before it, as it does of infinity.
    """
    bits: Array = values.view(U4)
    nan = values != values
    if mode == "rna":
        bits = np.where(nan, bits, bits + _HALF) & _KEPT
        beyond = (bits & _MAGNITUDE) > _LARGEST
        return np.where(beyond, bits - _LAST, bits).view(F4) if satfinite else bits.view(F4)
    if mode == "rn":
        bits = bits + _BELOW_HALF + ((bits >> _THIRTEEN) & _ONE)
    elif mode != "rz":
        raise ValueError(f"mode: expected one of rna, rn, rz; got {mode!r}")
    bits = bits & _KEPT
    if satfinite:
        bits = np.where((bits & _MAGNITUDE) > _LARGEST, (bits & _SIGN) | _LARGEST, bits)
    if relu:
        bits = np.where(bits & _SIGN != 0, _ZERO, bits)
    return np.where(nan, _NAN & _KEPT, bits).view(F4)


def operand(values: Array) -> Array:
    """float32 as a matrix unit reads a tf32 operand: the last 13 bits are ignored."""
    return (values.view(U4) & _KEPT).view(F4)
