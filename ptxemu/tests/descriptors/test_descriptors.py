"""Descriptors: bits of the ISA's tables, strangers' values, layouts, errors that name the field."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxemu.descriptors import (
    BlockScaledInstructionDescriptor,
    InstructionDescriptor,
    Swizzle,
    Tcgen05Descriptor,
    TensorMap,
    WgmmaDescriptor,
    ZeroColumnMask,
    decode,
    decode_instruction,
    encode,
    gather_operand,
    operand_addresses,
)
from ptxemu.descriptors.matrix_layout import Major, MatrixLayout, chunk_plan, pieces
from ptxemu.descriptors.swizzle import PERIOD

# Descriptors: bit positions as the ISA's tables give them, and errors that name the field.

OFFSETS = st.integers(0, (1 << 14) - 1).map(lambda x: x << 4)


def test_wgmma_descriptor_has_the_bits_of_the_isa_table() -> None:
    descriptor = WgmmaDescriptor(0x400, 16, 1024, Swizzle.B128, base_offset=5)
    assert descriptor.encode() == 0x40 | 1 << 16 | 64 << 32 | 5 << 49 | 1 << 62


def test_tcgen05_descriptor_has_the_bits_of_the_isa_table() -> None:
    descriptor = Tcgen05Descriptor(0x400, 16, 1024, Swizzle.B128, base_offset=5)
    assert descriptor.encode() == 0x40 | 1 << 16 | 64 << 32 | 1 << 46 | 5 << 49 | 2 << 61


@pytest.mark.parametrize(
    ("mode", "wgmma", "tcgen05"),
    [
        (Swizzle.NONE, 0, 0),
        (Swizzle.B128, 1, 2),
        (Swizzle.B64, 2, 4),
        (Swizzle.B32, 3, 6),
        (Swizzle.B128_ATOM_32B, None, 1),
    ],
)
def test_swizzle_codes_differ_between_wgmma_and_tcgen05(
    mode: Swizzle, wgmma: int | None, tcgen05: int
) -> None:
    assert Tcgen05Descriptor(0, 0, 0, mode).encode() >> 61 == tcgen05
    if wgmma is None:
        with pytest.raises(ValueError, match="swizzle"):
            WgmmaDescriptor(0, 0, 0, mode).encode()
    else:
        assert WgmmaDescriptor(0, 0, 0, mode).encode() >> 62 == wgmma


TCGEN05_MODES = [mode for mode in Swizzle if mode <= Swizzle.B128_ATOM_32B]


@given(OFFSETS, OFFSETS, OFFSETS, st.sampled_from(TCGEN05_MODES), st.integers(0, 7))
def test_tcgen05_descriptor_round_trips(
    start: int, leading: int, stride: int, mode: Swizzle, base: int
) -> None:
    descriptor = Tcgen05Descriptor(start, leading, stride, mode, base)
    assert Tcgen05Descriptor.decode(descriptor.encode()) == descriptor


@pytest.mark.parametrize("mode", [Swizzle.B128_ATOM_32B_FLIP_8B, Swizzle.B128_ATOM_64B])
def test_swizzles_that_only_tensor_maps_have_are_refused(mode: Swizzle) -> None:
    for descriptor in (WgmmaDescriptor(0, 0, 0, mode), Tcgen05Descriptor(0, 0, 0, mode)):
        with pytest.raises(ValueError, match=f"no mode {mode.name}"):
            descriptor.encode()


def test_tcgen05_descriptor_refuses_reserved_swizzles() -> None:
    with pytest.raises(ValueError, match="expected 0, 1, 2, 4 or 6; got 3"):
        Tcgen05Descriptor.decode(3 << 61 | 1 << 46)


def test_tcgen05_descriptor_names_wrong_fixed_bits() -> None:
    problems = Tcgen05Descriptor.decode(1 << 52 | 1 << 55).problems()
    assert len(problems) == 3
    assert "bits 46-48 must be 0b001; got 0b000" in problems[0]


def test_misaligned_offsets_are_refused() -> None:
    with pytest.raises(ValueError, match="stride_dimension: expected a multiple of 16"):
        WgmmaDescriptor(0, 0, 8).encode()


def test_instruction_descriptor_has_the_bits_of_the_isa_table() -> None:
    descriptor = InstructionDescriptor(
        "f16", 128, 256, "f32", "bf16", "f16", negate_b=True, transpose_a=True, maximum_shift=16
    )
    expected = 1 << 4 | 1 << 7 | 0 << 10 | 1 << 14 | 1 << 15 | 32 << 17 | 8 << 24 | 2 << 30
    assert descriptor.encode() == expected
    assert InstructionDescriptor.decode(expected, "f16") == descriptor


@pytest.mark.parametrize(
    ("kind", "atype", "code"),
    [
        ("f16", "f16", 0),
        ("f16", "bf16", 1),
        ("tf32", "tf32", 2),
        ("f8f6f4", "e4m3", 0),
        ("f8f6f4", "e5m2", 1),
        ("f8f6f4", "e2m3", 3),
        ("f8f6f4", "e3m2", 4),
        ("f8f6f4", "e2m1", 5),
        ("i8", "u8", 0),
        ("i8", "s8", 1),
    ],
)
def test_type_codes(kind: str, atype: str, code: int) -> None:
    dtype = "s32" if kind == "i8" else "f32"
    value = InstructionDescriptor(kind, 64, 8, dtype, atype, atype).encode()
    assert value >> 7 & 7 == code
    assert value >> 10 & 7 == code
    assert decode_instruction(value, kind).atype == atype


def test_reserved_types_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"atype of \.kind::f16: expected 0 \(f16\), 1 \(bf16\)"):
        InstructionDescriptor.decode(1 << 4 | 2 << 7, "f16")
    with pytest.raises(ValueError, match=r"dtype of \.kind::tf32: expected f32; got f16"):
        InstructionDescriptor.decode(2 << 7 | 2 << 10, "tf32")


def test_block_scaled_descriptor_has_the_bits_of_the_isa_table() -> None:
    descriptor = BlockScaledInstructionDescriptor(
        "mxf4nvf4", 256, 64, "e2m1", "e2m1", "ue4m3", scale_factor_a_id=2, scale_factor_b_id=0
    )
    assert descriptor.encode() == 1 << 7 | 1 << 10 | 8 << 17 | 2 << 27 | 2 << 29
    assert decode_instruction(descriptor.encode(), "mxf4nvf4") == descriptor


def test_depth_of_an_instruction() -> None:
    depth = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}
    for kind, k in depth.items():
        types = {"f16": "f16", "tf32": "tf32", "f8f6f4": "e4m3", "i8": "s8"}
        assert InstructionDescriptor(kind, 64, 8, "f32", types[kind], types[kind]).k == k
    assert BlockScaledInstructionDescriptor("mxf8f6f4", 128, 8, "e4m3", "e4m3", "ue8m0").k == 32
    assert BlockScaledInstructionDescriptor("mxf4", 128, 8, "e2m1", "e2m1", "ue8m0").k == 64


def _spans(text: str) -> list[bool]:
    """A mask as the ISA prints it: highest column first, blanks between spans."""
    return [bit == "1" for bit in reversed(text.replace(" ", ""))]


def test_zero_column_masks_are_those_of_the_isa_examples() -> None:
    example_2 = ZeroColumnMask(is_nonzero=True, skip_span=3, use_span=4)
    assert example_2.zero_columns(128, 14).tolist() == _spans("111 0000 111 0000")
    example_4 = ZeroColumnMask(
        (0, 1, 2, 1), (True, True, False, False), True, skip_span=3, use_span=4, column_shift=2
    )
    mask = example_4.zero_columns(32, 4 * 9).reshape(4, 9)
    assert mask[0].tolist() == _spans("11 0000 111")
    assert mask[1].tolist() == _spans("111 0000 11")
    assert mask[2].tolist() == _spans("0000 111 00")
    assert mask[3].tolist() == _spans("000 111 000")
    assert ZeroColumnMask.decode(example_4.encode()) == example_4


# Matrix layouts: descriptors find what TMA writes, for every swizzle and major-ness.


def test_base_offset_shifts_the_pattern() -> None:
    """A pattern that starts at 0x880 instead of a 1024-byte boundary has base offset 1."""
    layout = MatrixLayout(Major.K, Swizzle.B128, 16, 1024, 8, 2, 0x880 % PERIOD, base_offset=1)
    chunks = chunk_plan(layout).chunks[:, 0] * 16
    rows = np.arange(8)
    assert chunks.tolist() == (0x80 + rows * 128 + rows * 16).tolist()


@pytest.mark.parametrize("mode", TCGEN05_MODES)
@pytest.mark.parametrize("major", list(Major))
def test_pieces_are_the_same_bytes_as_the_chunks(mode: Swizzle, major: Major) -> None:
    layout = MatrixLayout(major, mode, 4096, 1024, 16, 2, 64)
    plan = chunk_plan(layout)
    from_chunks = (plan.chunks.reshape(-1, 1) * 16 + np.arange(16)).reshape(-1)
    from_pieces = (plan.starts[:, None] + np.arange(plan.size)).reshape(-1)
    assert sorted(from_chunks.tolist()) == from_pieces.tolist()
    assert plan.end == from_pieces.max() + 1


def test_neighbouring_chunks_become_one_piece() -> None:
    starts, size = pieces(np.array([[0, 16, 128], [144, 256, 272]]))
    assert starts.tolist() == [0, 128, 256]
    assert size == 32


# `decode` and `encode`: the same bits both ways, strangers' values, and errors that say why.

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


# `gather_operand`: matrices written by hand into canonical layouts come back in logical order.

FAMILIES = (WgmmaDescriptor, Tcgen05Descriptor)


def swizzled(address: int, span: int) -> int:
    """PTX ISA, "Shared Memory Layout and Swizzling": address bits 4 to 6 by bits 7 to 9."""
    return address ^ (address >> 3 & span - 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_mn_major_columns_are_found_behind_the_swizzle(family: type) -> None:
    columns, start, leading = 128, 0x400, 4096
    image = np.zeros(0x4000, dtype=np.uint8)
    tile = np.random.default_rng(1).integers(0, 256, (columns, 16, 2), dtype=np.uint8)
    for n in range(columns):
        for k in range(16):
            place = start + n // 64 * leading + k // 8 * 1024 + k % 8 * 128 + n % 64 * 2
            for byte in range(2):
                image[swizzled(place + byte, 128)] = tile[n, k, byte]
    descriptor = family(start, leading, 1024, Swizzle.B128)
    seen = gather_operand(image, descriptor, major="MN", shape=(columns, 16), element_bytes=2)
    assert np.array_equal(seen, tile)


def test_unswizzled_core_matrices_use_both_strides() -> None:
    descriptor = Tcgen05Descriptor(0, 128, 256)
    found = operand_addresses(descriptor, major="K", shape=(16, 16), element_bytes=2)
    assert found[0, 8] == 128 and found[8, 0] == 256 and found[3, 9] == 3 * 16 + 128 + 2


def test_an_image_may_start_anywhere() -> None:
    image = np.arange(512, dtype=np.uint16).view(np.uint8)
    descriptor = WgmmaDescriptor(0x400, 128, 256)
    shape = {"shape": (8, 16), "element_bytes": 2}
    seen = gather_operand(image, descriptor, major="K", image_address=0x400, **shape)  # type: ignore[arg-type]
    assert seen.view(np.uint16)[1, 0, 0] == 8
    with pytest.raises(ValueError, match="the image has 0x600 to 0xa00"):
        gather_operand(image, descriptor, major="K", image_address=0x600, **shape)  # type: ignore[arg-type]


def test_half_a_chunk_is_refused() -> None:
    descriptor = WgmmaDescriptor(0, 128, 256)
    with pytest.raises(ValueError, match="whole chunks of 16 bytes along K; got 4"):
        operand_addresses(descriptor, major="K", shape=(8, 4), element_bytes=2)
