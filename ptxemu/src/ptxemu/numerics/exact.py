"""float64 operations rounded once in any mode, lane by lane with exact rationals.

Slow and obviously right: kernels hardly use float64. NumPy does the operations that it rounds as
asked (add, sub, mul, div, sqrt to nearest). Which NaN comes out is not decided here
(`canonical.of_operand`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from ptxemu.numerics.dtypes import F8, Array


def fma_f64(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """a * b + c rounded once."""
    return _each(lambda x, y, z: _fma(x, y, z, mode), a, b, c)


def add_f64_in(a: Array, b: Array, mode: str) -> Array:
    """a + b rounded once in `mode`."""
    return _each(lambda x, y: _fma(x, 1.0, y, mode), a, b)


def mul_f64_in(a: Array, b: Array, mode: str) -> Array:
    """a * b rounded once in `mode`."""
    return _each(lambda x, y: _product(x, y, mode), a, b)


def div_f64_in(a: Array, b: Array, mode: str) -> Array:
    """a / b rounded once in `mode`."""
    return _each(lambda x, y: _quotient(x, y, mode), a, b)


def sqrt_f64_in(a: Array, mode: str) -> Array:
    """The square root rounded once in `mode`."""
    return _each(lambda x: _root(x, mode), a)


def integer_to_f64_in(values: Array, mode: str) -> Array:
    """Integers rounded to float64 in `mode`."""
    result = [rounded(Fraction(value), mode) for value in values.tolist()]
    return np.array(result, dtype=F8)


def rounded(value: Fraction, mode: str) -> float:
    """A rational that is not zero as float64; zero gives +0."""
    try:
        nearest = value.numerator / value.denominator  # Python rounds this to nearest even
    except OverflowError:
        nearest = math.inf if value > 0 else -math.inf
    return _directed(nearest, _compare(nearest, value), value > 0, mode)


def _compare(nearest: float, value: Fraction) -> int:
    """Sign of nearest - value."""
    return (nearest > value) - (nearest < value)


def _directed(nearest: float, excess: int, positive: bool, mode: str) -> float:
    """The neighbour of `nearest` on the side that `mode` asks for, if it lies on the other."""
    if mode == "rz":
        mode = "rm" if positive else "rp"
    if mode == "rm" and excess > 0:
        return math.nextafter(nearest, -math.inf)
    if mode == "rp" and excess < 0:
        return math.nextafter(nearest, math.inf)
    return nearest


def _each(function: Callable[..., float], *lanes: Array) -> Array:
    rows = zip(*(lane.tolist() for lane in lanes), strict=True)
    return np.array([function(*row) for row in rows], dtype=F8)


def _fma(a: float, b: float, c: float, mode: str) -> float:
    negative = _minus(a) != _minus(b)  # the product's sign
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if value:
        return rounded(value, mode)
    if negative == _minus(c):
        return c  # zeros of one sign
    return -0.0 if mode == "rm" else 0.0


def _minus(value: float) -> bool:
    return math.copysign(1, value) < 0


def _product(a: float, b: float, mode: str) -> float:
    if not (math.isfinite(a) and math.isfinite(b)) or a == 0 or b == 0:
        return a * b
    return rounded(Fraction(a) * Fraction(b), mode)


def _quotient(a: float, b: float, mode: str) -> float:
    if math.isnan(a) or math.isnan(b) or math.isinf(a) or math.isinf(b) or a == 0 or b == 0:
        with np.errstate(all="ignore"):
            return float(np.float64(a) / np.float64(b))
    return rounded(Fraction(a) / Fraction(b), mode)


def _root(a: float, mode: str) -> float:
    if not a > 0 or math.isinf(a):
        return math.nan if a < 0 else a
    nearest = math.sqrt(a)
    square, value = Fraction(nearest) ** 2, Fraction(a)
    return _directed(nearest, (square > value) - (square < value), True, mode)
