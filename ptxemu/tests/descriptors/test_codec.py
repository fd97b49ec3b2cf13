"""`decode` and `encode`: the same bits both ways, strangers' values, and errors that say why."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ptxemu.descriptors import (
    InstructionDescriptor,
    Swizzle,
    Tcgen05Descriptor,
    TensorMap,
    WgmmaDescriptor,
    decode,
    encode,
)

RECORDED = json.loads(Path(__file__).with_name("strangers.json").read_text())
"""Values inside compiled kernels of other packages; see its "provenance"."""
NAMELESS = {8: 0x02, 10: 0x20}
"""Bits of tensor maps, by byte, that CuTe DSL's own encoder sets and the driver (580) does not."""
VALUES = [
    (kernel["name"], what, value)
    for kernel in RECORDED["kernels"]
    for what, values in kernel["values"].items()
    for value in values
]


def decoded(what: str, value: str) -> Any:
    if what == "tensor_map":  # recorded without the driver's notes, which the hardware ignores
        return decode(bytes.fromhex(value).ljust(128, b"\0"), what)
    what, _, kind = what.partition(" ")
    return decode(int(value, 16), what, kind=kind or None)


@pytest.mark.parametrize(("kernel", "what", "value"), VALUES)
def test_strangers_values_come_back_bit_for_bit(kernel: str, what: str, value: str) -> None:
    fields = decoded(what, value)
    bits = encode(fields)
    if isinstance(bits, bytes):
        differing = [a ^ b for a, b in zip(bits[:64], bytes.fromhex(value), strict=True)]
        assert {at for at, bit in enumerate(differing) if bit & ~NAMELESS.get(at, 0)} == set()
        assert decode(bits, what) == fields
    else:
        assert bits == int(value, 16)


def test_quacks_gemm_multiplies_bf16_tiles_swizzled_by_128_bytes() -> None:
    found = decode(0x4000404000010880, "tcgen05")
    assert found == Tcgen05Descriptor(0x8800, 16, 1024, Swizzle.B128)
    found = decode(0x10400490, "instruction", kind="f16")
    assert found == InstructionDescriptor("f16", 256, 256, "f32", "bf16", "bf16")
    assert decode(0x4000004000010680, "wgmma") == WgmmaDescriptor(0x6800, 16, 1024, Swizzle.B128)


def test_a_tensor_map_is_what_the_driver_was_asked_for() -> None:
    made = TensorMap(0x7F00_0000_1000, "bf16", (576, 64), (1152,), (64, 8), (1, 1))
    made = replace(made, swizzle=Swizzle.B128)
    assert decode(made.encode(), "tensor_map") == made
    assert encode(made) == made.encode()


def test_signed_values_are_the_same_bits() -> None:
    bits = 0xC000004000010040
    assert decode(bits - (1 << 64), "wgmma") == decode(bits, "wgmma")


@pytest.mark.parametrize(
    ("value", "what", "kind", "expected"),
    [
        (0, "umma", None, "expected one of wgmma, tcgen05, zero_mask, instruction, tensor_map"),
        (0, "instruction", None, "kind: an instruction descriptor needs one of f16"),
        (0, "tcgen05", "f16", "others none; got 'f16' for tcgen05"),
        (0, "instruction", "f64", "expected one of f16, tf32"),
        (1 << 64, "tcgen05", None, "expected 64 bits"),
        (1 << 32, "instruction", "f16", "expected 32 bits"),
        (3 << 61, "tcgen05", None, "expected 0, 1, 2, 4 or 6; got 3"),
        (b"\0" * 64, "tensor_map", None, "expected the 128 bytes"),
        (b"\0" * 8, "wgmma", None, "expected an int"),
    ],
)
def test_errors_name_what_was_expected(
    value: int | bytes, what: str, kind: str | None, expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        decode(value, what, kind=kind)
