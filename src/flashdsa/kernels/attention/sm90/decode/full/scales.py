"""Scales of packed rows in f16: e4m3 times a scale is rounded once, whatever the scale.

A scale is a sum of two f16, of which the first is the nearest to it: its product with e4m3 (4 bits)
and that of the rest are added in one operation. If a scale is so small that f16 cannot represent
the rest, both are of the scale times a power of two, which the values are divided by.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from flashdsa.dsl import cp_async, fragments, ptx
from flashdsa.kernels.attention.sm90.decode.shared.words import as_float, power_of_two
from flashdsa.problem import KV_GROUP
from flashdsa.row_formats import RowFormat

LEAST_EXPONENT = -24
"""Least exponent of a power of two in f16."""
LEAST_OF_SUM = -11
"""Exponent from which the rest has at least two bits in f16. Smaller scales that are not powers of
two take a power."""
MANTISSA = (1 << 23) - 1
"""Mantissa bits of fp32."""


BIAS, NAN_SCALE = 127, 255
"""Bias of an e8m0 exponent, and the byte of NaN."""


class Factors(NamedTuple):
    """Factors of the lane's two neighbouring parts of a key."""

    scales: list[Int32]  # bits of fp32, or four e8m0 or e4m3 each
    sums: list[Int32]  # f16 nearest to the scale and the rest; of e8m0 two first powers
    small: Boolean  # whether any lane of the warp has a power other than 1 besides


def factors_of_scales(scales: list[Any], form: RowFormat) -> Factors:
    """Factors from the bits of fp32 or from e8m0; e4m3 have none but themselves."""
    if form.scale == "e8m0":
        return powers_of_scales(scales, form)
    if form.scale != "fp32":
        return Factors(scales, [], Boolean(False))
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


@cute.jit
def powers_of_scales(scales: list[Int32], form: cutlass.Constexpr) -> Factors:
    """Factors of e8m0: a power of two that f16 represents, and another one where that is not all. A
    code times the first one is exact, so a value is rounded once, and 0 times it is 0."""
    of_lane = 4 * len(scales)
    sums, small = [], Boolean(False)
    for pair in cutlass.range_constexpr(of_lane // 2):
        firsts = []
        for number in cutlass.range_constexpr(2 * pair, 2 * pair + 2):
            byte = scales[number // 4] >> (8 * (number % 4)) & 255
            first = first_exponent(byte)
            has_rest = Boolean(byte - BIAS != first)
            if cutlass.const_expr(of_lane + number >= form.num_scales):
                has_rest = has_rest & (cute.arch.lane_idx() % 2 == 0)  # the odd lane's is unused
            small = small | has_rest
            value = power_of_two(first)
            if byte == NAN_SCALE:
                value = as_float(Int32(0x7FFFFFFF))
            firsts.append(value)
        sums.append(fragments.pack(firsts[0], firsts[1], fragments.F16_KIND))
    return Factors(scales, sums, cute.arch.vote_any_sync(small))


def first_exponent(byte: Any) -> Any:
    """Exponent of the first power of an e8m0 scale: the nearest that f16 has as a normal number."""
    return cutlass.min(cutlass.max(byte - BIAS, Int32(-14)), Int32(15))


@cute.jit
def take_first(
    factors: Factors, owner: Any, form: cutlass.Constexpr, number: cutlass.Constexpr, unit: Any
):
    """All lanes: take the first power of 16 columns of a lane's part; f16, a word's low half."""
    pairs, group = KV_GROUP // form.group // 2, unit * cp_async.COPY_BYTES // form.group
    words = [cute.arch.shuffle_sync(factors.sums[pairs * number + i], owner) for i in range(pairs)]
    word = words[0]
    if cutlass.const_expr(pairs == 2):
        word = words[1] if group >= 2 else words[0]
    return word >> (group % 2 * 16)


def take_rest(factors: Factors, owner: Any, form: RowFormat, number: int, unit: Any) -> Any:
    """Take, by all lanes, the power that is missing in the first one; f16, twice in a word."""
    word, first = divmod(number * (KV_GROUP // form.group), 4)
    four = cute.arch.shuffle_sync(factors.scales[word], owner)
    byte = four >> (8 * (first + unit * cp_async.COPY_BYTES // form.group)) & 255
    rest = byte - BIAS - first_exponent(byte)
    return twice(power_of_two(cutlass.max(rest, Int32(LEAST_EXPONENT))))


@cute.jit
def take_pair(scales: list[Any], owner: Any, unit: Any) -> Any:
    """Take, by all lanes, the e4m3 scales of 32 e2m1 columns of a lane's half, as two f16."""
    words = [cute.arch.shuffle_sync(word, owner) for word in scales]
    low = words[1] if unit & 2 != 0 else words[0]
    high = words[3] if unit & 2 != 0 else words[2]
    four = high if unit & 4 != 0 else low
    return ptx.word(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, low; }",
        four >> (unit % 2 * 16),
    )


def expand_e2m1(word: Any, scale: Any) -> list[Any]:
    """Eight e2m1 times a scale, as four words of f16. The high bytes of f16 of codes 0 to 7 are 00
    38 3C 3E 40 42 44 46, their low bytes are 0; the sign is bit 3 of a code. Permutations look up
    four bytes, and take four signs to their places."""
    halves = []
    for codes, signs in (("x", "0x1504"), ("y", "0x3726")):
        halves.append(
            f"prmt.b32 a, 0x3E3C3800, 0x46444240, {codes}; prmt.b32 b, {{$r0}}, z, {signs}; "
            "and.b32 b, b, 0x80808080; or.b32 a, a, b; "
        )
    spread = [f"prmt.b32 c, a, 0, {order}; mul.rn.f16x2 " for order in ("0x1404", "0x3424")]
    body = "".join(
        half + "".join(f"{one}{{$w{2 * i + j}}}, c, {{$r1}}; " for j, one in enumerate(spread))
        for i, half in enumerate(halves)
    )
    return ptx.words(
        "{ .reg .b32 a, b, c, x, y, z; and.b32 x, {$r0}, 0x77777777; shr.u32 y, x, 16; "
        "shl.b32 z, {$r0}, 4; " + body + "}",
        4,
        word,
        scale,
    )


def expand_by_power(word: Any, power: Any, _: Any) -> Any:
    """Four e4m3 times a power of two, as two words of f16."""
    return ptx.words(
        "{ .reg .b16 low, high; .reg .b32 a, b; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high; "
        "mul.rn.f16x2 {$w0}, a, {$r1}; mul.rn.f16x2 {$w1}, b, {$r1}; }",
        2,
        word,
        power,
    )


def both_of_sum(both: Any) -> tuple[Any, Any]:
    """Both f16 of a sum, each twice in a word."""
    return tuple(
        ptx.words(
            "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
            "mov.b32 {$w0}, {low, low}; mov.b32 {$w1}, {high, high}; }",
            2,
            both,
        )
    )


def take_power(factors: Factors, owner: Any, number: int) -> Any:
    """Take, by all lanes, the power of a lane's group of that number; f16, twice in a word."""
    bits = cute.arch.shuffle_sync(factors.scales[number], owner)
    return twice(power_of_two(power_of_scale(bits)))


def expand_word(word: Any, nearest: Any, rest: Any) -> Any:
    """Four e4m3 times a sum, as two words of f16."""
    return ptx.words(
        "{ .reg .b16 low, high; .reg .b32 a, b, c, d; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 a, low; cvt.rn.f16x2.e4m3x2 b, high; "
        "mul.rn.f16x2 c, a, {$r2}; mul.rn.f16x2 d, b, {$r2}; "
        "fma.rn.f16x2 {$w0}, a, {$r1}, c; fma.rn.f16x2 {$w1}, b, {$r1}, d; }",
        2,
        word,
        nearest,
        rest,
    )


def multiply_word(word: Any, power: Any) -> Any:
    """Two f16 times two."""
    return ptx.word("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", word, power)


def twice(value: Any) -> Any:
    """fp32 as two equal f16 in a word."""
    return ptx.word("cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r0};", value)


def as_sum(value: Any) -> Any:
    """The nearest f16 in the low half of a word, and the rest in the high half."""
    return ptx.word(
        "{ .reg .b16 low, high; .reg .f32 near, rest; cvt.rn.f16.f32 low, {$r0}; "
        "cvt.f32.f16 near, low; sub.rn.f32 rest, {$r0}, near; cvt.rn.f16.f32 high, rest; "
        "mov.b32 {$w0}, {low, high}; }",
        value,
    )
