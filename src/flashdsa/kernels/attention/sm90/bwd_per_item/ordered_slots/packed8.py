"""Eight fp32 of dKV in twelve bytes: 11 bits each, and the exponent of the largest.

A number is off by at most 2^-10 of the largest one of its eight. All eight become NaN if one of
them is not finite.

The numbers lie one after the other in 96 bits, then the exponent. Six of them can be masked without
a shift: with the exponent of a power of two above them they are an fp32.
"""

import struct
from typing import Any

from cutlass import Float32, Int32, cute

NUMBERS = 8
WORDS = 3
BITS = 11
LEAST_EXPONENT = 9
"""Least exponent, biased; numbers that are smaller have the steps of this one."""
NOT_FINITE = 255
_ZERO = 1 << BITS - 1
_MASK = (1 << BITS) - 1
_MAGIC = 0x4B000000
"""Bits of 2^23: the low bits of a sum with it are the other number as an integer."""
_BIASED_ZERO = f"0f{_MAGIC + _ZERO:08X}"
_LARGEST_SCALE = 263
"""Largest scale, biased: the largest number times 2^(263 - 127 - its own exponent) is below
2^10."""
_PLACES = ((0, 0), (0, BITS), (0, 22), (1, 1), (1, 12), (1, 23), (2, 2), (2, 13))
"""The word and the bit with which each number begins; two of them end in the next word."""
_EXPONENT_BIT = 24
"""First bit of the exponent in the last word."""


def _words_of_zeros(exponent: int) -> tuple[int, ...]:
    bits = exponent << 32 * (WORDS - 1) + _EXPONENT_BIT
    for word, bit in _PLACES:
        bits |= _ZERO << 32 * word + bit
    words = (bits >> 32 * word & 0xFFFFFFFF for word in range(WORDS))
    return tuple(word - (1 << 32) if word >> 31 else word for word in words)


NOTHING = _words_of_zeros(LEAST_EXPONENT)
"""Eight zeros."""
_NOT_FINITE_WORDS = _words_of_zeros(NOT_FINITE)
"""Zeros times infinity."""


def _float_bits(value: float) -> int:
    return int.from_bytes(struct.pack(">f", value))


def pack_eight(values: list[Any]) -> list[Any]:
    """Pack eight fp32 into three words."""
    largest = "abs.f32 m, {$r0}; " + "".join(
        f"abs.f32 t, {{$r{i}}}; max.NaN.f32 m, m, t; " for i in range(1, NUMBERS)
    )
    exponent = (
        # The exponent is the largest one's after rounding, so that it is below 2^10 then too.
        f"mov.b32 e, m; add.u32 e, e, {1 << 23 - BITS + 1}; shr.u32 e, e, 23; "
        f"min.u32 e, e, {NOT_FINITE}; max.u32 e, e, {LEAST_EXPONENT}; "
        f"sub.u32 f, {_LARGEST_SCALE}, e; shl.b32 f, f, 23; mov.b32 s, f; "
    )
    numbers = "".join(
        f"fma.rn.f32 t, {{$r{i}}}, s, {_BIASED_ZERO}; mov.b32 u{i}, t; " for i in range(NUMBERS)
    )
    words = ["", "", f"shl.b32 w2, e, {_EXPONENT_BIT}; "]
    # The part of 2^23 that is not shifted out, to be subtracted.
    magics = [0] * WORDS
    for i, (word, bit) in enumerate(_PLACES):
        words[word] += f"shl.b32 f, u{i}, {bit}; add.u32 w{word}, w{word}, f; "
        magics[word] += _MAGIC << bit
        if bit + BITS > 32:
            words[word + 1] += f"shr.u32 f, u{i}, {32 - bit}; add.u32 w{word + 1}, w{word + 1}, f; "
            magics[word + 1] += _MAGIC >> 32 - bit
    first = "mov.b32 w0, 0; mov.b32 w1, 0; "
    last = f"setp.eq.u32 bad, e, {NOT_FINITE}; " + "".join(
        f"sub.u32 w{w}, w{w}, {magics[w] & 0xFFFFFFFF}; "
        f"selp.b32 {{$w{w}}}, {_NOT_FINITE_WORDS[w]}, w{w}, bad; "
        for w in range(WORDS)
    )
    registers = (
        "{ .reg .pred bad; .reg .f32 m, s, t; "
        ".reg .b32 e, f, u0, u1, u2, u3, u4, u5, u6, u7, w0, w1, w2; "
    )
    return cute.arch.inline_ptx(
        registers + largest + exponent + numbers + first + "".join(words) + last + "}",
        write_only_types=[Int32] * WORDS,
        read_only_args=values,
    )


def add_packed(total: list[Any], words: list[Any]) -> list[Any]:
    """Add the eight numbers of three words to `total`, each sum rounded once."""
    names = [f"{{$r{NUMBERS + word}}}" for word in range(WORDS)]
    parts = []
    for i, (word, bit) in enumerate(_PLACES):
        source, place = names[word], bit
        if bit + BITS > 32:
            parts.append(f"shf.r.clamp.b32 u, {names[word]}, {names[word + 1]}, {bit}; ")
            source, place = "u", 0
        elif bit + BITS > 23:
            source, place = "last", bit - 1
        # The number's lowest bit is 2^-9 with this exponent, and 2^10 of them are 2.
        power = 14 - place
        biased_zero = f"0f{_float_bits(2.0**power + 2.0):08X}"
        parts.append(
            f"and.b32 u, {source}, {_MASK << place}; or.b32 u, u, {127 + power << 23}; "
            f"mov.b32 t, u; sub.f32 t, t, {biased_zero}; fma.rn.f32 {{$w{i}}}, t, s, {{$r{i}}}; "
        )
    return cute.arch.inline_ptx(
        "{ .reg .f32 s, t; .reg .b32 u, last; "
        f"shr.u32 last, {names[-1]}, 1; and.b32 u, last, {0xFF << 23}; mov.b32 s, u; "
        + "".join(parts)
        + "}",
        write_only_types=[Float32] * NUMBERS,
        read_only_args=[*total, *words],
    )
