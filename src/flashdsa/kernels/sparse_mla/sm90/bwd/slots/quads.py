"""Four neighbouring fp32 of dKV in eight bytes: 14 bits each, and the exponent of the largest.

A number is off by at most 2^-12 of the largest one of its four. Where one of them is not finite all
four become NaN.
"""

from typing import Any

from cutlass import Float32, Int32, cute

WORDS = 2
"""Of four numbers."""
LEAST_EXPONENT = 12
"""Biased; numbers that are smaller have the steps of this one."""
BITS = 14
_BIASED_ZERO = "0f4B002000"
"""2^23 + 2^13: the low bits of what is added to it are the number, as an integer, and 2^13."""
NOTHING = (
    (0x2000 | 0x2000 << BITS | (LEAST_EXPONENT & 15) << 28) - (1 << 32),
    0x2000 | 0x2000 << BITS,
)
"""Four zeros."""


def pack_four(values: list[Any]) -> list[Any]:
    """Two words of four fp32."""
    parts = [
        f"fma.rn.f32 t, {{$r{i}}}, s, {_BIASED_ZERO}; mov.b32 u{i}, t; and.b32 u{i}, u{i}, 16383; "
        for i in range(4)
    ]
    largest = "abs.f32 m, {$r0}; " + "".join(
        f"abs.f32 t, {{$r{i}}}; max.NaN.f32 m, m, t; " for i in range(1, 4)
    )
    return cute.arch.inline_ptx(
        "{ .reg .f32 m, s, t; .reg .b32 e, f, u0, u1, u2, u3; "
        + largest
        + f"mov.b32 e, m; shr.u32 e, e, 23; max.u32 e, e, {LEAST_EXPONENT}; "
        # So that the largest one is below 2^12.
        "sub.u32 f, 265, e; shl.b32 f, f, 23; mov.b32 s, f; "
        + "".join(parts)
        + f"shl.b32 u1, u1, {BITS}; or.b32 u0, u0, u1; shl.b32 f, e, 28; or.b32 {{$w0}}, u0, f; "
        f"shl.b32 u3, u3, {BITS}; or.b32 u2, u2, u3; and.b32 e, e, 240; shl.b32 f, e, 24; "
        "or.b32 {$w1}, u2, f; }",
        write_only_types=[Int32] * WORDS,
        read_only_args=values,
    )


def add_packed(total: list[Any], words: list[Any]) -> list[Any]:
    """`total` and the four numbers of two words, each sum rounded once."""
    parts = [
        f"shr.u32 u, {{$r{4 + i // 2}}}, {BITS * (i % 2)}; and.b32 u, u, 16383; "
        "or.b32 u, u, 0x4B000000; mov.b32 t, u; "
        f"sub.f32 t, t, {_BIASED_ZERO}; fma.rn.f32 {{$w{i}}}, t, s, {{$r{i}}}; "
        for i in range(4)
    ]
    return cute.arch.inline_ptx(
        "{ .reg .f32 s, t; .reg .b32 e, u; .reg .pred bad; "
        "shr.u32 e, {$r4}, 28; shr.u32 u, {$r5}, 24; and.b32 u, u, 240; or.b32 e, e, u; "
        "setp.eq.u32 bad, e, 255; sub.u32 e, e, 11; shl.b32 e, e, 23; "
        "selp.b32 e, 0x7FFFFFFF, e, bad; mov.b32 s, e; " + "".join(parts) + "}",
        write_only_types=[Float32] * 4,
        read_only_args=[*total, *words],
    )
