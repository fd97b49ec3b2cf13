"""Keys, bins and ranges: scores as unsigned integers in the same order, and monotone functions of
them.

The bins are a window of 32 binary exponents around 1 with 64 bins each, for either sign; keys
outside fall into the end bins, which costs the threshold's search a round, not exactness. A round
divides a range of entries into bins. An entry is (key, position); of equal keys the smaller
position is better.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute

NAN = 0x7FFFFFFF
"""NaN that every fp32 instruction returns."""
INVALID = 0x7FFFFFFE
"""A word without a score."""
LOWEST = -(2**31) + 1
"""The key of `NAN`. That of `INVALID` is below it."""
MAGNITUDE = 0x7FFFFFFF
MANTISSA = 6
"""Bits of the mantissa in a bin, beside sign and exponent: 4,096 bins."""
FP32_MANTISSA, SIGN_AND_EXPONENT = 23, 8
EXPONENTS, FIRST_EXPONENT = 32, 112
"""Exponents that have bins of their own, the first of which is of 2**-15."""
BIN_BITS = 12
SIGN = -(2**31)
"""Flips the order of unsigned words into that of signed ones."""
LOWEST_KEY = 1
"""Lowest key of all tokens: see `sortable`."""
NO_POSITION = -(2**31)
"""The position of no token; as an unsigned number it is above all positions."""


def key_of(word: Int32) -> Int32:
    """Signed integer in the order of scores, of a word: the bits of a score, or `INVALID`. The
    addition of 2 turns the greatest one, `NAN`, into `LOWEST`, and `INVALID` into the least."""
    return (word ^ ((word >> 31) & MAGNITUDE)) + 2


def word_of(key: Int32) -> Int32:
    """The word of a key: the inverse of `key_of`. Keys of no score give words that no score is at
    least, if compared as fp32."""
    word = key - 2
    return word ^ ((word >> 31) & MAGNITUDE)


def sortable(score: Float32) -> Uint32:
    """The score as an unsigned integer in the same order; -0 counts as +0, NaN gets the smallest
    key of a token, 1. Key 0 is that of no token: a list that was compacted before it had topk
    tokens accepts any other key afterwards."""
    # The sum with 0 turns -0 into +0, and any NaN into `NAN`.
    return Uint32(key_of((score + Float32(0.0)).bitcast(Int32))) ^ Uint32(0x80000000)


@cute.jit
def bin_of(key: Uint32, mantissa: cutlass.Constexpr = MANTISSA) -> Int32:
    """The key's bin; `mantissa`: bits of the mantissa that bins have."""
    half, start = EXPONENTS << mantissa, FIRST_EXPONENT << mantissa
    signed = Int32(key >> (FP32_MANTISSA - mantissa)) - (1 << (SIGN_AND_EXPONENT + mantissa))
    magnitude = signed ^ (signed >> 31)
    within = cutlass.min(cutlass.max(magnitude - start, Int32(0)), Int32(half - 1))
    return half + within if signed >= 0 else half - 1 - within


@cute.jit
def lowest_key(bin_index: Int32, mantissa: cutlass.Constexpr = MANTISSA) -> Uint32:
    """The smallest key of a bin; of the bin after the last one, a key that no score has."""
    half, start = EXPONENTS << mantissa, FIRST_EXPONENT << mantissa
    middle = 1 << (SIGN_AND_EXPONENT + mantissa)
    shifted = middle + start + bin_index - half
    if bin_index < half:
        shifted = middle - 1 - (half - 1 - bin_index + start)
    if bin_index == half:
        shifted = Int32(middle)
    if bin_index <= 0:
        shifted = Int32(0)
    lowest = Uint32(shifted) << (FP32_MANTISSA - mantissa)
    if bin_index >= 2 * half:
        lowest = Uint32(0xFFFFFFFF)
    return lowest


@cute.jit
def highest_key(bin_index: Int32, mantissa: cutlass.Constexpr = MANTISSA) -> Uint32:
    """The largest key of a bin."""
    return lowest_key(bin_index + 1, mantissa) - 1


def signed(key: Uint32) -> Int32:
    """The key as a signed word in the same order."""
    return Int32(key) ^ Int32(SIGN)


def unsigned(word: Int32) -> Uint32:
    """The key of which `signed` gives the word."""
    return Uint32(word ^ Int32(SIGN))


@cute.jit
def reach(counts: Any, above: Int32, k: Int32) -> tuple[Int32, Int32, Int32]:
    """Find the `k`-th best entry in four counts, the last one the best: return (index of its count,
    entries above that one, entries in it). above: entries better than all of them."""
    index, within = Int32(3), Int32(counts[3])
    for i in cutlass.range_constexpr(3):
        if above + within < k:
            above += within
            index, within = Int32(2 - i), Int32(counts[2 - i])
    return index, above, within


@cute.jit
def step_bits(width: Uint32, bin_bits: cutlass.Constexpr) -> Int32:
    """Right shift after which values in [0, width] fit in so many bits."""
    return cutlass.max(Int32(32 - bin_bits) - Int32(cute.arch.clz(width)), Int32(0))


@cute.jit
def step_at(low: Uint32, high: Uint32, shift: Int32, chosen: Int32) -> tuple[Uint32, Uint32]:
    """The first and the last value of a step of 2**shift of the values `low` to `high`."""
    # Distances from `low`: a sum with it could wrap around in the last step below 2**32.
    first = Uint32(chosen) << Uint32(shift)
    last = cutlass.min(first + (Uint32(1) << Uint32(shift)) - 1, high - low)
    return low + first, low + last


def between(value: Any, low: Any, width: Uint32) -> cutlass.Boolean:
    """Whether a value is one of `low` to `low` + `width`: one below wraps around to far above."""
    return Uint32(value - low) <= width


@cute.jit
def accepts(key: Uint32, position: Uint32, at_key: Uint32, at_position: Uint32) -> cutlass.Boolean:
    """Whether an entry is at least as good as the threshold."""
    return (key > at_key) or (key == at_key and position <= at_position)


class Part(NamedTuple):
    """The caller's part of a row, as positions, and the number of its listed entries."""

    first: Int32
    end: Int32
    entries: Int32


class Range(NamedTuple):
    """Entries that may be the threshold: keys and inverted positions, both ends included. Positions
    are inverted (~position), so that a larger number is better, as with keys."""

    low: Uint32
    high: Uint32
    inv_low: Uint32
    inv_high: Uint32


@cute.jit
def inside(range_: Range, key: Uint32, inv_position: Uint32) -> cutlass.Boolean:
    """Whether an entry is in the range."""
    return (
        key >= range_.low
        and key <= range_.high
        and inv_position >= range_.inv_low
        and inv_position <= range_.inv_high
    )


def cut_to_part(range_: Range, part: Part) -> Range:
    """The range, cut to the part's positions."""
    return Range(range_.low, range_.high, ~Uint32(part.end - 1), ~Uint32(part.first))


class Steps(NamedTuple):
    """Division of a range into bins: by keys, or by inverted positions when one key is left."""

    by_position: cutlass.Boolean
    base: Uint32
    top: Uint32
    shift: Int32


@cute.jit
def steps_of(range_: Range) -> Steps:
    """Divide the range into up to 4096 equal steps."""
    by_position = range_.low == range_.high
    base = range_.inv_low if by_position else range_.low
    top = range_.inv_high if by_position else range_.high
    return Steps(by_position, base, top, step_bits(top - base, BIN_BITS))


@cute.jit
def narrowed(range_: Range, steps: Steps, chosen: Int32) -> Range:
    """One step of the range."""
    low, high = step_at(steps.base, steps.top, steps.shift, chosen)
    return Range(
        low=range_.low if steps.by_position else low,
        high=range_.high if steps.by_position else high,
        inv_low=low if steps.by_position else range_.inv_low,
        inv_high=high if steps.by_position else range_.inv_high,
    )
