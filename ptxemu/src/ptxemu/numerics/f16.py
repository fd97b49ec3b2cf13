"""float16: rounding to it, with the canonical NaN, and a fused multiply-add."""

from __future__ import annotations

import numpy as np

from ptxemu.numerics.dtypes import F2, F8, U2, Array, constant, has_nan
from ptxemu.numerics.minifloat import F16

NAN = 0x7FFF
"""The canonical NaN."""
_NAN = constant(NAN, U2)
_EXPONENT = constant(0x7C00, U2)
_SIGN = constant(0x8000, U2)


def narrow(values: Array) -> Array:
    """float32 or float64 rounded to nearest even, as float16; NaN becomes the canonical one."""
    result = values.astype(F2)
    if has_nan(values):
        result = np.where(values != values, _NAN, result.view(U2)).view(F2)
    return result


def narrow_exact(values: Array, mode: str, *, satfinite: bool = False, relu: bool = False) -> Array:
    """float64 rounded in any mode, as float16."""
    codes = F16.encode(values, mode, satfinite=satfinite, relu=relu)
    return codes.astype(U2).view(F2)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once to nearest even.

    float64 is enough: where it rounds the sum, one addend is below the last bit of the other by so
    much that the larger one, which float16 holds exactly or overflows, decides.
    """
    return narrow(a.astype(F8) * b.astype(F8) + c.astype(F8))


def flush(values: Array) -> Array:
    """float16 with subnormals replaced by zeros of their sign (.ftz)."""
    bits = values.view(U2)
    return np.where((bits & _EXPONENT) == 0, bits & _SIGN, bits).view(F2)
