"""Codes of 4, 6 and 8 bits from and to float32, float16 and bf16, by tables.

A format of at most 6 significant bits gets the right code, in every rounding mode, from a float32
cut to its upper 16 bits with the last of them set if anything was lost (rounded to odd bf16). So
one table of 65,536 codes does a conversion; each is built when first used.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from ptxemu.numerics import bf16
from ptxemu.numerics.dtypes import F2, F8, U1, U2, U4, Array, constant, split
from ptxemu.numerics.minifloat import FORMATS

_ALL = np.arange(1 << 16, dtype=U2)
_ONE = constant(1, U2)
UE8M0_NAN = 0xFF


def odd_bf16(values: Array) -> Array:
    """float32 (contiguous) rounded to odd bf16: the index into a table of codes."""
    halves = split(values, U2)
    return halves[1::2] | np.minimum(halves[0::2], _ONE)


@cache
def codes_of_bf16(name: str, mode: str, satfinite: bool, relu: bool) -> Array:
    """The code of each bf16 (uint8), for `odd_bf16` or for bf16 operands."""
    if name == "ue8m0":
        return _ue8m0_codes(mode, satfinite)
    return _encode(bf16.widen(_ALL), name, mode, satfinite, relu)


@cache
def codes_of_f16(name: str, mode: str, satfinite: bool, relu: bool) -> Array:
    """The code of each float16 (uint8)."""
    return _encode(_ALL.view(F2), name, mode, satfinite, relu)


def _encode(values: Array, name: str, mode: str, satfinite: bool, relu: bool) -> Array:
    with np.errstate(all="ignore"):
        wide = values.astype(F8)
        return FORMATS[name].encode(wide, mode, satfinite=satfinite, relu=relu).astype(U1)


def _ue8m0_codes(mode: str, satfinite: bool) -> Array:
    """The exponent of the magnitude; NaN has no sign either. Mode rz or rp."""
    magnitude = _ALL & 0x7FFF
    codes = magnitude >> 7
    if mode == "rp":
        codes = codes + ((magnitude & 0x7F != 0) & (magnitude > 0x40) & (magnitude < 0x7F80))
    if satfinite:
        codes = np.where((magnitude <= 0x7F80) & (codes == UE8M0_NAN), UE8M0_NAN - 1, codes)
    return codes.astype(U1)


@cache
def values_of(name: str) -> Array:
    """The float32 that each code stands for."""
    if name == "ue8m0":
        values: Array = np.ldexp(np.float32(1), np.minimum(np.arange(256), UE8M0_NAN - 1) - 127)
        values[UE8M0_NAN] = np.nan
        return values
    form = FORMATS[name]
    return form.decode(np.arange(1 << form.bits))


@cache
def pairs_as_f16x2(name: str, relu: bool) -> Array:
    """Return the two float16 in a uint32 for each pair of codes (two bytes; two nibbles for e2m1).

    The unused upper bits of a 6-bit code's byte are ignored.
    """
    values = values_of(name)
    if relu:
        values = np.where(np.signbit(values) & (values == values), np.float32(0), values)
    halves = values.astype(F2).view(U2)
    halves = np.where(np.isnan(values), U2.type(0x7FFF), halves).astype(U4)
    width = 4 if name == "e2m1" else 8
    pairs = np.arange(1 << (2 * width), dtype=U4)
    mask = len(values) - 1
    packed: Array = (halves[(pairs >> width) & mask] << 16) | halves[pairs & mask]
    return packed


@cache
def ue8m0_pairs_as_bf16x2() -> Array:
    """Return the two bf16 in a uint32 for each pair of ue8m0 codes."""
    codes = np.arange(256, dtype=U4)
    halves = np.where(codes == 0, 0x40, codes << 7)
    halves = np.where(codes == UE8M0_NAN, bf16.NAN, halves).astype(U4)
    pairs = np.arange(1 << 16, dtype=U4)
    packed: Array = (halves[pairs >> 8] << 16) | halves[pairs & 0xFF]
    return packed
