"""Rounding defined with rationals, to judge the vectorised code; shares nothing with it."""

import math
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

SPECIAL_F32 = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x33800000, 0x3F800000,
    0xBF800000, 0x3F800001, 0x3F7FFFFF, 0x4B800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
    0x7FC00000, 0xFFC00001, 0x7FFFFFFF,
]  # fmt: skip

f32_bits = st.one_of(st.sampled_from(SPECIAL_F32), st.integers(0, 2**32 - 1))


def f32_lanes(size=32):
    """Arrays of float32 with any bits."""
    return st.lists(f32_bits, min_size=size, max_size=size).map(
        lambda bits: np.array(bits, np.uint32).view(np.float32)
    )


SPECIAL_F64 = [
    0, 1 << 63, 1, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x3FF0000000000000, 0xBFF0000000000000,
    0x3FF0000000000001, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000,
    0x7FF8000000000000, 0x43E0000000000000, 0x43F0000000000000, 0xC3E0000000000000,
]  # fmt: skip

f64_bits = st.one_of(st.sampled_from(SPECIAL_F64), st.integers(0, 2**64 - 1))


def f64_lanes(size=32):
    """Arrays of float64 with any bits."""
    return st.lists(f64_bits, min_size=size, max_size=size).map(
        lambda bits: np.array(bits, np.uint64).view(np.float64)
    )


class Grid:
    """The finite numbers of a binary format: p bits of significand, exponents from emin on."""

    def __init__(self, p, emin, largest):
        self.p, self.emin, self.largest = p, emin, Fraction(largest)

    def quantum(self, x):
        """The distance of the grid's points around x."""
        estimate = x.numerator.bit_length() - x.denominator.bit_length() - 1
        exponent = max(self.emin, estimate)
        while abs(x) >= Fraction(2) ** (exponent + 1):
            exponent += 1
        return Fraction(2) ** (exponent - self.p + 1)

    def round(self, x, mode):
        """A rational on the grid, or +-inf; a zero result is the Fraction 0."""
        quantum = self.quantum(x)
        below = x // quantum * quantum
        above = below if below == x else below + quantum
        rounded = self._choose(x, below, above, quantum, mode)
        if abs(rounded) <= self.largest:
            return rounded
        towards_zero = mode == "rz" or (mode == "rm" and x > 0) or (mode == "rp" and x < 0)
        if towards_zero:
            return self.largest if x > 0 else -self.largest
        return math.inf if x > 0 else -math.inf

    def _choose(self, x, below, above, quantum, mode):
        if mode == "rm" or (mode == "rz" and x >= 0):
            return below
        if mode == "rp" or mode == "rz":
            return above
        if x - below != above - x:
            return below if x - below < above - x else above
        if mode == "rna":
            return above if x > 0 else below
        return below if (below / quantum) % 2 == 0 else above


F32 = Grid(24, -126, (2 - Fraction(1, 2**23)) * 2**127)
F64 = Grid(53, -1022, (2 - Fraction(1, 2**52)) * 2**1023)
F16 = Grid(11, -14, 65504)
BF16 = Grid(8, -126, (2 - Fraction(1, 2**7)) * 2**127)
TF32 = Grid(11, -126, (2 - Fraction(1, 2**10)) * 2**127)


def same(found, expected):
    """Equal bits; any NaN equals any NaN."""
    found, expected = np.asarray(found), np.asarray(expected, dtype=np.asarray(found).dtype)
    bits = np.dtype(f"u{found.itemsize}")
    return (found.view(bits) == expected.view(bits)) | ((found != found) & (expected != expected))


def rounded_float(grid, exact, mode, zero=0.0):
    """A Python float from the grid; `zero` is what an exact zero becomes."""
    if exact == 0:
        return zero
    value = float(grid.round(exact, mode))
    return math.copysign(value, -1.0 if exact < 0 else 1.0)


def zero_of_sum(a, b, mode):
    """The zero that a + b is when it is exactly 0 (IEEE 754, 6.3)."""
    if math.copysign(1, a) == math.copysign(1, b):
        return math.copysign(0.0, a)
    return -0.0 if mode == "rm" else 0.0


def fma(grid, a, b, c, mode):
    """a * b + c of Python floats, rounded once to the grid."""
    if not all(map(math.isfinite, (a, b, c))):
        if math.isfinite(a) and math.isfinite(b):
            return c
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    sign = math.copysign(1, a) * math.copysign(1, b)
    return rounded_float(grid, exact, mode, zero_of_sum(math.copysign(0.0, sign), c, mode))


def divide(grid, a, b, mode):
    """a / b of Python floats, rounded once to the grid."""
    if math.isfinite(a) and math.isfinite(b) and b != 0:
        sign = math.copysign(1, a) * math.copysign(1, b)
        return rounded_float(grid, Fraction(a) / Fraction(b), mode, math.copysign(0.0, sign))
    with np.errstate(all="ignore"):
        return float(np.float64(a) / np.float64(b))
