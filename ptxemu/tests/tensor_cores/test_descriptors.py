"""Descriptors: bit positions as the ISA's tables give them, and errors that name the field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxemu.descriptors import (
    BlockScaledInstructionDescriptor,
    InstructionDescriptor,
    Swizzle,
    Tcgen05Descriptor,
    WgmmaDescriptor,
    ZeroColumnMask,
    decode_instruction,
)

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
