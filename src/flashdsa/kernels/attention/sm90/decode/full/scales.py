"""Scales of packed rows in f16: e4m3 times a scale is rounded once, whatever the scale.

A scale is a sum of two f16, of which the first is the nearest to it: its product with e4m3 (4 bits)
and that of the rest are added in one operation. If a scale is so small that f16 cannot represent
the rest, both are of the scale times a power of two, which the values are divided by.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from flashdsa.kernels.attention.sm90.decode.shared.words import as_float, power_of_two

LEAST_EXPONENT = -24
"""Least exponent of a power of two in f16."""
LEAST_OF_SUM = -11
"""Exponent from which the rest has at least two bits in f16. Smaller scales that are not powers of
two take a power."""
MANTISSA = (1 << 23) - 1
"""Mantissa bits of fp32."""


class Factors(NamedTuple):
    """Factors of the lane's two neighbouring groups of a key."""

    scales: list[Int32]  # bits of fp32
    sums: list[Int32]  # f16 nearest to the scale, or to its multiple, and the rest
    small: Boolean  # whether any lane of the warp has a power other than 1


def factors_of_scales(scales: list[Any]) -> Factors:
    """Factors from the bits of fp32."""
    sums, small = [], Boolean(False)
    for bits in scales:
        power = power_of_scale(bits)
        small = small | (power < 0)
        sums.append(as_sum(as_float(bits) * power_of_two(-power)))
    return Factors(scales, sums, cute.arch.vote_any_sync(small))


@cute.jit
def power_of_scale(bits: Int32) -> Int32:
    """Exponent of the power of two that values of that scale are multiplied by: 0 or less."""
    exponent = ((bits >> 23) & 255) - 127
    power = cutlass.min(exponent - LEAST_OF_SUM, Int32(0))
    power = cutlass.max(power, Int32(LEAST_EXPONENT - LEAST_OF_SUM))
    if bits & MANTISSA == 0:
        power = Int32(0)
    return power


def take_sum(factors: Factors, owner: Any, number: int) -> Any:
    """Take, by all lanes, the sum of a lane's group of that number; two f16 in a word."""
    return cute.arch.shuffle_sync(factors.sums[number], owner)


def both_of_sum(both: Any) -> tuple[Any, Any]:
    """Both f16 of a sum, each twice in a word."""
    return tuple(
        cute.arch.inline_ptx(
            "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
            "mov.b32 {$w0}, {low, low}; mov.b32 {$w1}, {high, high}; }",
            write_only_types=[Int32, Int32],
            read_only_args=[both],
        )
    )


def take_power(factors: Factors, owner: Any, number: int) -> Any:
    """Take, by all lanes, the power of a lane's group of that number; f16, twice in a word."""
    bits = cute.arch.shuffle_sync(factors.scales[number], owner)
    return twice(power_of_two(power_of_scale(bits)))


def expand_word(word: Any, nearest: Any, rest: Any) -> Any:
    """Four e4m3 times a sum, as two words of f16."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; .reg .b32 a, b, c, d; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high; "
        "mul.rn.f16x2 c, a, {$r2}; mul.rn.f16x2 d, b, {$r2}; "
        "fma.rn.f16x2 {$w0}, a, {$r1}, c; fma.rn.f16x2 {$w1}, b, {$r1}, d; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word, nearest, rest],
    )


def multiply_word(word: Any, power: Any) -> Any:
    """Two f16 times two."""
    return cute.arch.inline_ptx(
        "mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[word, power]
    )


def twice(value: Any) -> Any:
    """fp32 as two equal f16 in a word."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def as_sum(value: Any) -> Any:
    """The nearest f16 in the low half of a word, and the rest in the high half."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; .reg .f32 near, rest; cvt.rn.f16.f32 low, {$r0}; "
        "cvt.f32.f16 near, low; sub.rn.f32 rest, {$r0}, near; cvt.rn.f16.f32 high, rest; "
        "mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Int32],
        read_only_args=[value],
    )
