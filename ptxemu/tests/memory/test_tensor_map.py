"""Tensor maps, tiled and im2col: the driver's bits and refusals, and what is read back."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxemu.descriptors.swizzle import Swizzle
from ptxemu.descriptors.tensor_map import (
    DRIVER_TYPES,
    ELEMENT_BITS,
    Im2colMap,
    TensorMap,
    decode,
    decode_map,
    encode_tiled,
)
from ptxemu.engines.im2col import column, positions
from ptxemu.errors import LaunchError

# Tensor maps: the driver's bits, the driver's refusals, and what is read back.

RECORDED: list[dict[str, Any]] = json.loads(
    gzip.decompress((Path(__file__).parent / "h200_tensor_maps.json.gz").read_bytes())
)
"""cuTensorMapEncodeTiled's results on an H200 (`tests.silicon.record --maps`)."""
SM100_TYPES, SM100_SWIZZLES = (13, 14, 15), (4, 5, 6)


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    names = ("address", "dims", "strides", "box", "element_strides", "interleave", "swizzle")
    return {
        "data_type": case["dtype"],
        "l2_promotion": case["l2_promotion"],
        "fill": case["oob_fill"],
        **{name: case[name] for name in names},
    }


def of_hopper(row: dict[str, Any]) -> bool:
    args = row["args"]
    return (
        args["dtype"] not in SM100_TYPES
        and args["swizzle"] not in SM100_SWIZZLES
        and args["rank"] == len(args["dims"])
    )


def test_map_has_the_bits_that_the_driver_writes() -> None:
    accepted = [row for row in RECORDED if row["result"] == 0]
    for row in accepted:
        words = np.frombuffer(encode_tiled(**arguments(row["args"])), dtype=np.uint64)
        assert [f"{word:x}" for word in words.tolist()] == row["words"], row["args"]
    assert len(accepted) > 200


def test_what_the_driver_refuses_is_refused() -> None:
    refused = [row for row in RECORDED if row["result"] != 0 and of_hopper(row)]
    for row in refused:
        with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE"):
            encode_tiled(**arguments(row["args"]))
    assert len(refused) > 50


def test_what_only_blackwell_has_is_marked() -> None:
    plain = arguments(RECORDED[0]["args"])
    assert not decode(encode_tiled(**plain)).needs_sm100
    for swizzle in SM100_SWIZZLES:
        assert decode(encode_tiled(**{**plain, "swizzle": swizzle})).needs_sm100
    for data_type in SM100_TYPES:
        packed = {**plain, "data_type": data_type, "dims": (128, 4, 4), "box": (128, 1, 1)}
        assert decode(encode_tiled(**packed)).needs_sm100


GOOD: dict[str, Any] = {
    "data_type": 6,
    "address": 0x10000,
    "dims": (64, 32, 16),
    "strides": (128, 4096),
    "box": (16, 4, 2),
    "element_strides": (1, 1, 1),
}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("data_type", 16),
        ("address", 0x10008),
        ("address", 1 << 57),
        ("dims", (0, 32, 16)),
        ("dims", (64, 32, 2**32 + 1)),
        ("dims", ()),
        ("strides", (120, 4096)),
        ("strides", (128, 1 << 40)),
        ("strides", (128,)),
        ("box", (0, 4, 2)),
        ("box", (16, 257, 2)),
        ("box", (12, 4, 2)),
        ("box", (256, 256, 4)),
        ("element_strides", (1, 9, 1)),
        ("element_strides", (0, 1, 1)),
        ("interleave", 3),
        ("swizzle", 7),
        ("l2_promotion", 4),
        ("fill", 2),
    ],
)
def test_refusal_names_the_argument(argument: str, value: object) -> None:
    with pytest.raises(LaunchError, match=f"tensor map: {argument}: expected"):
        encode_tiled(**{**GOOD, argument: value})


def test_swizzled_row_may_not_exceed_the_span() -> None:
    with pytest.raises(LaunchError, match="box: expected a row of at most 32 bytes"):
        encode_tiled(**{**GOOD, "box": (24, 4, 2), "swizzle": 1})


def test_nan_fill_of_integers_is_refused() -> None:
    with pytest.raises(LaunchError, match="fill: expected NaN only of a float type"):
        encode_tiled(**{**GOOD, "data_type": 1, "fill": 1})


def test_interleave_32b_needs_32_byte_alignment() -> None:
    with pytest.raises(LaunchError, match="strides: expected multiples of 32"):
        encode_tiled(**{**GOOD, "strides": (144, 4096), "interleave": 2})


@st.composite
def maps(draw: st.DrawFn) -> TensorMap:
    rank = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([name for name in DRIVER_TYPES if ELEMENT_BITS[name] >= 8]))

    def each(low: int, high: int, count: int = rank) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))

    inner = 16 * 8 // ELEMENT_BITS[dtype]
    return TensorMap(
        draw(st.integers(0, 2**53 - 1)) * 16, dtype, each(1, 2**32),
        tuple(16 * stride for stride in each(0, 2**36 - 1, rank - 1)),
        (inner, *each(1, 8, rank - 1)), each(1, 8), 0, draw(st.sampled_from(list(Swizzle))),
        draw(st.integers(0, 3)), draw(st.integers(0, 1)) if "f" in dtype else 0,
    )  # fmt: skip


@given(maps())
def test_decoded_map_is_the_one_that_was_encoded(made: TensorMap) -> None:
    encoded = encode_tiled(
        DRIVER_TYPES.index(made.dtype), made.address, made.dims, made.strides, made.box,
        made.element_strides, made.interleave, made.swizzle, made.l2_promotion, made.fill,
    )  # fmt: skip
    assert decode(encoded) == made


def test_sizes_of_a_box() -> None:
    made = decode(encode_tiled(**{**GOOD, "element_strides": (3, 3, 1), "swizzle": 3}))
    assert made.landed == (16, 2, 2)
    assert (made.rows, made.row_bytes, made.pitch) == (4, 32, 128)


def test_padded_type_takes_a_byte_an_element_in_shared_memory() -> None:
    packed = {**GOOD, "data_type": 15, "dims": (128, 4, 4), "strides": (96, 384)}
    made = decode(encode_tiled(**{**packed, "box": (128, 2, 1)}))
    assert (made.dtype, made.row_bytes, made.shared_row_bytes) == ("b6x16_p32", 96, 128)


def test_bytes_that_are_no_map_are_refused() -> None:
    with pytest.raises(ValueError, match="no tensor map"):
        decode(b"\xff" * 128)


# Tensor maps in im2col mode: the bits that CuTe DSL's host code makes, refusals, positions.

U16 = 1
CUTE_DSL = {
    # rank: dims, lower, upper, and the first eight words, made by CuTe DSL 4.8.1 for f16
    3: (
        ((64, 7, 15), (-300,), (-2,)),
        (0x8_0004_0323, 0x38, 0x0, 0x6_0000_003F, 0xE, 0x1F00_0000_0000_0000, 0x1F_FFFE_FED4),
    ),
    4: (
        ((64, 7, 5, 3), (-1, -2), (-3, -4)),
        (
            0x8_0004_0333, 0x118_0000_0038, 0x0, 0x6_0000_003F, 0x2_0000_0004,
            0x1F00_0000_0000_0000, 0x1F_FCFD_FEFF,
        ),
    ),
    5: (
        ((64, 7, 5, 4, 3), (-1, -2, 1), (-3, -4, -1)),
        (
            0x8_0004_0343, 0x118_0000_0038, 0x460, 0x6_0000_003F, 0x3_0000_0004,
            0x1F00_0000_0000_0002, 0x1F_7F9D_07DF,
        ),
    ),
}  # fmt: skip


def dense_strides(dims):
    return tuple(int(np.prod(dims[:k])) * 2 for k in range(1, len(dims)))


def image_map(dims, lower, upper, **fields):
    """A dense f16 map of 32 channels and 32 pixels."""
    plain = {"address": 0, "dtype": "f16", "strides": dense_strides(dims), "box": (32,)}
    plain |= {"element_strides": (1,) * len(dims), "l2_promotion": 2, "pixels": 32}
    return Im2colMap(dims=dims, lower=lower, upper=upper, **plain | fields)


@pytest.mark.parametrize("rank", CUTE_DSL)
def test_the_bits_are_those_of_cute_dsl(rank):
    (dims, lower, upper), words = CUTE_DSL[rank]
    address = 0x5625_F504_9900
    made = image_map(dims, lower, upper, address=address).encode()
    assert np.frombuffer(made, np.uint64)[:8].tolist() == [address, *words]
    read = decode_map(made)
    assert isinstance(read, Im2colMap)
    assert (read.dims, read.lower, read.upper, read.pixels) == (dims, lower, upper, 32)


def test_tiled_maps_stay_tiled():
    assert not isinstance(decode_map(encode_tiled(U16, 0, (64, 4), (128,), (8, 2))), Im2colMap)


def test_positions_wrap_at_the_box_and_go_on_in_the_next_image():
    made = Im2colMap(
        0, "u16", (8, 4, 3, 2), (16, 64, 192), (8,), (1,) * 4, lower=(-1, 0), upper=(-2, -1),
        pixels=8,
    )  # fmt: skip
    assert positions(made, (0, 1, 0)).tolist() == [
        [0, 1, 0], [1, 1, 0], [-1, 0, 1], [0, 0, 1], [1, 0, 1], [-1, 1, 1], [0, 1, 1], [1, 1, 1]
    ]  # fmt: skip
    addresses, pixels, part = column(made, (0, 0, 1, 0), (0, 0))
    assert pixels.tolist() == [0, 1, 3, 4, 6, 7]
    assert addresses.tolist()[:3] == [64, 80, 192]
    assert (part.start, part.stop) == (0, 16)
