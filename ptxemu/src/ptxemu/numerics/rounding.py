"""Operations on float32 that round once, in each of PTX's rounding modes (rn, rz, rm, rp).

A float64 holds the product of two float32 exactly, and a quotient or square root precisely enough
that rounding it again to float32 changes nothing. A sum it may round: `to_odd` then keeps, in the
last bit, whether something was lost, and rounding that to 51 bits or fewer is exact in every mode.
"""

from __future__ import annotations

import numpy as np

from ptxemu.numerics.dtypes import F4, F8, I8, U4, U8, Array, constant

_LOW_28 = constant((1 << 28) - 1, U8)
_LOW_29 = constant((1 << 29) - 1, U8)
_TIE = constant(1 << 28, U8)
_ONE_U8 = constant(1, U8)
_TWICE_SMALLEST_NORMAL = constant((1023 - 126) << 53, U8)
_ONE_I8 = constant(1, I8)
_SIGN = constant(1 << 31, U4)
_EXPONENT = constant(0x7F800000, U4)
_CANONICAL = constant(0x7FFFFFFF, U4)
_ZERO = constant(0, F4)


def sum_error(a: Array, b: Array, total: Array) -> Array:
    """a + b - total, exactly, where total is a + b rounded to nearest float64 (Knuth's two-sum)."""
    part = total - a
    error: Array = (a - (total - part)) + (b - part)
    return error


def to_odd(value: Array, error: Array) -> Array:
    """value + error, where `error` is what rounding to nearest lost, rounded to odd float64."""
    bits = value.view(I8)
    lost = (error > 0) | (error < 0)  # a NaN error comes with an infinite or NaN value
    away = (error > 0) == (value > 0)
    moved = np.where(away, bits + _ONE_I8, bits - _ONE_I8)
    return np.where(lost & ((bits & _ONE_I8) == 0), moved, bits).view(F8)


def narrow_f32(value: Array, mode: str) -> Array:
    """float64 rounded to float32."""
    nearest = value.astype(F4)
    if mode == "rn":
        return nearest
    back = nearest.astype(F8)
    if mode == "rz":
        return (nearest.view(U4) - (np.abs(back) > np.abs(value))).view(F4)
    if mode == "rm":
        return np.where(back > value, np.nextafter(nearest, F4.type(-np.inf)), nearest)
    if mode == "rp":
        return np.where(back < value, np.nextafter(nearest, F4.type(np.inf)), nearest)
    raise ValueError(f"mode: expected one of rn, rz, rm, rp; got {mode!r}")


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once to nearest even."""
    product = a.astype(F8) * b.astype(F8)
    addend = c.astype(F8)
    total = product + addend
    # INVARIANT: rounding the float64 sum again goes wrong only where the sum is itself rounded and
    # is half way between two float32; half way means that at least the low 28 bits are zero.
    if np.count_nonzero(total.view(U8) & _LOW_28) != total.size:
        total = _without_false_ties(product, addend, total)
    return total.astype(F4)


def _without_false_ties(product: Array, addend: Array, total: Array) -> Array:
    bits = total.view(U8)
    tie = (bits & _LOW_29) == _TIE
    # A subnormal float32 ends further left; zero wraps around to the largest value here.
    subnormal = ((bits << _ONE_U8) - _ONE_U8) < _TWICE_SMALLEST_NORMAL
    if not np.count_nonzero(tie | subnormal):
        return total
    return to_odd(total, sum_error(product, addend, total))


def fma_f32_in(a: Array, b: Array, c: Array, mode: str) -> Array:
    """a * b + c rounded once in `mode`."""
    return _sum_f32(a.astype(F8) * b.astype(F8), c.astype(F8), mode)


def add_f32_in(a: Array, b: Array, mode: str) -> Array:
    """a + b rounded once in `mode`."""
    return _sum_f32(a.astype(F8), b.astype(F8), mode)


def _sum_f32(a: Array, b: Array, mode: str) -> Array:
    total = a + b
    result = narrow_f32(to_odd(total, sum_error(a, b, total)), mode)
    if mode == "rm":  # IEEE 754, 6.3: x - x is -0 when rounding towards minus infinity
        zero = (total == 0) & (np.signbit(a) | np.signbit(b))
        result = np.where(zero, -_ZERO, result)
    return result


def mul_f32_in(a: Array, b: Array, mode: str) -> Array:
    """a * b rounded once in `mode`."""
    return narrow_f32(a.astype(F8) * b.astype(F8), mode)


def div_f32_in(a: Array, b: Array, mode: str) -> Array:
    """a / b rounded once in `mode`."""
    return narrow_f32(a.astype(F8) / b.astype(F8), mode)


def sqrt_f32_in(a: Array, mode: str) -> Array:
    """The square root rounded once in `mode`."""
    return narrow_f32(np.sqrt(a.astype(F8)), mode)


def flush_f32(values: Array) -> Array:
    """float32 with subnormals replaced by zeros of their sign (.ftz)."""
    bits = values.view(U4)
    flushed: Array = np.where((bits & _EXPONENT) == 0, bits & _SIGN, bits).view(F4)
    return flushed


def saturate(values: Array) -> Array:
    """Clamped to [0, 1]; NaN becomes +0 (.sat)."""
    zero, one = values.dtype.type(0), values.dtype.type(1)
    clamped: Array = np.where(values > zero, np.minimum(values, one), zero)
    return clamped


def canonical_f32(values: Array) -> Array:
    """float32 with every NaN replaced by the canonical one, 0x7fffffff."""
    if not np.count_nonzero(values != values):
        return values
    return np.where(values != values, _CANONICAL, values.view(U4)).view(F4)


def integer_to_odd_f64(values: Array) -> Array:
    """64-bit integers as float64, exactly or rounded to odd with at least 43 bits kept.

    A 64-bit magnitude keeps 53 bits: what rounding to float32 or narrower needs.
    """
    sign = np.where(values < 0, -1.0, 1.0) if values.dtype.kind == "i" else 1.0
    magnitude = values.astype(U8) if values.dtype.kind == "u" else np.abs(values).view(U8)
    low = magnitude & _LOW_11
    kept = (magnitude ^ low) | np.where(low != 0, _BIT_11, _ZERO_U8)
    is_large = magnitude > _LARGEST_EXACT
    result: Array = np.where(is_large, kept, magnitude).astype(F8) * sign
    return result


_LOW_11 = constant((1 << 11) - 1, U8)
_BIT_11 = constant(1 << 11, U8)
_ZERO_U8 = constant(0, U8)
_LARGEST_EXACT = constant(1 << 53, U8)
