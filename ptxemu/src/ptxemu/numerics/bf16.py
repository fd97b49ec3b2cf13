"""bfloat16: the upper half of a float32."""

from __future__ import annotations

import numpy as np

from ptxemu.numerics.dtypes import F4, F8, I4, U2, U4, Array, constant, has_nan, split
from ptxemu.numerics.minifloat import BF16
from ptxemu.numerics.rounding import sum_error, to_odd

NAN = 0x7FFF
"""The canonical NaN."""
_HALF = constant(0x8000, U4)
_NAN = constant(NAN, U2)


def widen(codes: Array) -> Array:
    """The float32 that bf16 codes (uint16) stand for; a NaN keeps its payload."""
    halves = np.zeros(2 * codes.size, U2)
    halves[1::2] = codes
    return halves.view(F4)


def narrow(values: Array) -> Array:
    """float32 rounded to nearest even, as codes; NaN becomes the canonical one.

    `values` must be contiguous.
    """
    # Adding half an ulp rounds ties up: then the kept part's last bit has to become even. A tie
    # leaves zeros below, and nothing else does.
    halves = split(values.view(U4) + _HALF, U2)
    lower, kept = halves[0::2], halves[1::2].copy()
    if np.count_nonzero(lower) != lower.size:
        kept &= ~(lower == 0).astype(U2)
    if has_nan(values):
        kept = np.where(values != values, _NAN, kept)
    return kept


def narrow_exact(values: Array, mode: str, *, satfinite: bool = False, relu: bool = False) -> Array:
    """float64 rounded in any mode, as codes."""
    return BF16.encode(values, mode, satfinite=satfinite, relu=relu).astype(U2)


def fma(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """a * b + c of codes, rounded once to nearest even, or in another mode."""
    product = widen(a).astype(F8) * widen(b)
    addend = widen(c).astype(F8)
    total = product + addend
    odd = to_odd(total, sum_error(product, addend, total))
    return narrow(_odd_f32(odd)) if mode == "rn" else narrow_exact(odd, mode)


def _odd_f32(values: Array) -> Array:
    """float64 rounded to odd float32, which narrows to bf16 as `values` themselves would."""
    nearest = values.astype(F4)
    lost = values - nearest  # exact, NaN where infinite
    bits = nearest.view(I4)
    away = (lost > 0) == (values > 0)
    moved = np.where(away, bits + 1, bits - 1)
    inexact = (lost > 0) | (lost < 0)
    return np.where(inexact & ((bits & 1) == 0), moved, bits).view(F4)
