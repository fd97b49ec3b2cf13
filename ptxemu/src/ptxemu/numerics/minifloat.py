"""Small floating-point formats in general: what their codes mean and how numbers become codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptxemu.numerics.dtypes import F4, F8, U4, Array


def _nearest_away(scaled: Array) -> Array:
    whole = np.trunc(scaled)
    return np.where(np.abs(scaled - whole) >= 0.5, whole + np.copysign(1.0, scaled), whole)


_TO_INTEGER: dict[str, Callable[[Array], Array]] = {
    "rn": np.rint,
    "rna": _nearest_away,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
}


@dataclass(frozen=True, slots=True)
class Format:
    """A format with a sign, an exponent and a mantissa, subnormals included.

    `largest` is the largest finite number. Codes above it are infinity, if there is one, and NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    infinity: int | None = None
    """Code of +infinity."""
    nan: int | None = None
    """Code of the canonical NaN; None: NaN becomes `largest`."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, and of the subnormal ones."""
        return 1 - self.bias

    def decode(self, codes: Array) -> Array:
        """The numbers that codes stand for, as float32."""
        codes = codes.astype(np.int64)
        field = (codes >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        fraction = codes & ((1 << self.mantissa_bits) - 1)
        significand = np.where(field == 0, fraction, fraction + (1 << self.mantissa_bits))
        exponent = np.maximum(field, 1) - self.bias - self.mantissa_bits
        magnitude = np.ldexp(significand.astype(F8), exponent)
        beyond = magnitude > self.largest
        is_infinite = (codes & ~self.sign_bit) == (-1 if self.infinity is None else self.infinity)
        magnitude = np.where(beyond, np.where(is_infinite, np.inf, np.nan), magnitude)
        return np.where(codes & self.sign_bit != 0, -magnitude, magnitude).astype(F4)

    @property
    def sign_bit(self) -> int:
        """The sign's bit in a code."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    def quantise(self, values: Array, mode: str) -> Array:
        """float64 rounded to the format's grid, before overflow is dealt with."""
        exponent = np.maximum(np.frexp(values)[1] - 1, self.min_exponent)
        step = exponent - self.mantissa_bits
        result: Array = np.ldexp(_TO_INTEGER[mode](np.ldexp(values, -step)), step)
        return result

    def stochastic(self, values: Array, share: Array) -> Array:
        """float64 rounded to the grid, away from zero where what is cut off plus `share` is a step.

        Args:
            share: random numbers in [0, 1), in units of the step.
        """
        exponent = np.maximum(np.frexp(values)[1] - 1, self.min_exponent)
        step = exponent - self.mantissa_bits
        scaled = np.ldexp(np.abs(values), -step)
        whole = np.trunc(scaled)
        whole = whole + (scaled - whole + share >= 1)
        result: Array = np.copysign(np.ldexp(whole, step), values)
        return result

    def encode(
        self, values: Array, mode: str, *, satfinite: bool = False, relu: bool = False
    ) -> Array:
        """float64 rounded to codes (uint32).

        Args:
            mode: rn, rna (ties away), rz, rm or rp.
            satfinite: beyond `largest`, and infinity, become `largest`; else as IEEE 754 rounds.
            relu: negative numbers, -0 included, become +0.
        """
        if relu:
            values = np.where(np.signbit(values) & ~np.isnan(values), 0.0, values)
        quantised = self.quantise(values, mode)
        magnitude = np.abs(quantised)
        over = magnitude > self.largest
        stays_finite = over & np.isfinite(values) & self._rounds_inward(values, mode)
        magnitude = np.where(stays_finite | (over & satfinite), self.largest, magnitude)
        codes = self._codes(magnitude)
        if self.infinity is not None:
            codes = np.where(np.isinf(magnitude) | (magnitude > self.largest), self.infinity, codes)
        codes = np.where(np.signbit(quantised), codes | self.sign_bit, codes)
        nan = self._code_of(self.largest) if self.nan is None else self.nan
        return np.where(np.isnan(values), nan, codes).astype(U4)

    def _rounds_inward(self, values: Array, mode: str) -> Array:
        """Return where overflow rounds to the largest finite number and not to infinity."""
        if mode in ("rn", "rna"):
            return np.zeros(values.shape, np.bool_)
        if mode == "rz":
            return np.ones(values.shape, np.bool_)
        return np.signbit(values) if mode == "rp" else ~np.signbit(values)

    def _codes(self, magnitude: Array) -> Array:
        """Codes of numbers of the grid; the carry of a full mantissa goes to the exponent."""
        finite = np.where(magnitude <= self.largest, magnitude, 0.0)
        exponent = np.maximum(np.frexp(finite)[1] - 1, self.min_exponent)
        exponent = np.where(finite == 0, self.min_exponent, exponent)
        significand = np.ldexp(finite, self.mantissa_bits - exponent).astype(np.int64)
        biased = (exponent - self.min_exponent).astype(np.int64) << self.mantissa_bits
        codes: Array = biased + significand
        return codes

    def _code_of(self, value: float) -> int:
        return int(self._codes(np.array([value]))[0])


E4M3 = Format("e4m3", 4, 3, 7, 448.0, nan=0x7F)
E5M2 = Format("e5m2", 5, 2, 15, 57344.0, infinity=0x7C, nan=0x7F)
E2M1 = Format("e2m1", 2, 1, 1, 6.0)
E2M3 = Format("e2m3", 2, 3, 1, 7.5)
E3M2 = Format("e3m2", 3, 2, 3, 28.0)
F16 = Format("f16", 5, 10, 15, 65504.0, infinity=0x7C00, nan=0x7FFF)
BF16 = Format("bf16", 8, 7, 127, (2.0 - 2.0**-7) * 2.0**127, infinity=0x7F80, nan=0x7FFF)
FORMATS = {f.name: f for f in (E4M3, E5M2, E2M1, E2M3, E3M2, F16, BF16)}
