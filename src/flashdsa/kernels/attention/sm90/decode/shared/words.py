"""Words of 16-bit numbers, and powers of two, by PTX that CuTe DSL has no operation for."""

from typing import Any

from cutlass import Int32

from flashdsa.dsl import ptx
from flashdsa.dsl.smem import VECTOR

BIAS = 127
"""Bias of the exponents of fp32 and bf16."""
TOP_EXPONENT = 14
"""Exponent of a row's largest number in f16, after its multiplication by a power of two."""
MOST_POWER = 126
"""Largest exponent of such a power for Q."""


def scaled(word: Any, factor: Any) -> Any:
    """Two bf16 times a power of two."""
    return ptx.word("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", word, factor)


def to_f16(word: Any) -> Any:
    """Two bf16 as two f16."""
    return ptx.word(
        "{ .reg .b32 low, high; shl.b32 low, {$r0}, 16; and.b32 high, {$r0}, 0xFFFF0000; "
        "cvt.rn.f16x2.f32 {$w0}, high, low; }",
        word,
    )


def from_f16(word: Any) -> Any:
    """Two f16 as fp32."""
    return ptx.numbers(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        2,
        word,
    )


def bits_of(value: Any) -> Any:
    """fp32 as a word."""
    return ptx.word("mov.b32 {$w0}, {$r0};", value)


def as_float(bits: Any) -> Any:
    """A word as fp32."""
    return ptx.number("mov.b32 {$w0}, {$r0};", bits)


def power_of_two(exponent: Any) -> Any:
    """2^exponent, a normal number, in fp32."""
    return as_float((exponent + BIAS) << 23)


def load_float(address: Any) -> Any:
    """Load one fp32 from shared memory."""
    return ptx.number("ld.shared.f32 {$w0}, [{$r0}];", address)


def store_pair(address: Any, first: Any, second: Any) -> None:
    """Store two fp32 to shared memory."""
    ptx.run("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", address, first, second)


def load_words_again(address: Any) -> list[Int32]:
    """Load four words of shared memory at each call: no earlier ones are kept for them."""
    return ptx.words("ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", VECTOR, address)


def store_word(address: Any, word: Any) -> None:
    """Store a word to shared memory."""
    ptx.run("st.shared.b32 [{$r0}], {$r1};", address, word)
