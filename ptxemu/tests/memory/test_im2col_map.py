"""Tensor maps in im2col mode: the bits that CuTe DSL's host code makes, refusals, positions."""

import numpy as np
import pytest

from ptxemu.descriptors.im2col_map import Im2colMap, decode_map, encode_im2col
from ptxemu.descriptors.tensor_map import encode_tiled
from ptxemu.errors import LaunchError
from ptxemu.memory.im2col import column, positions

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
    made = encode_im2col(image_map(dims, lower, upper, address=address))
    assert np.frombuffer(made, np.uint64)[:8].tolist() == [address, *words]
    read = decode_map(made)
    assert isinstance(read, Im2colMap)
    assert (read.dims, read.lower, read.upper, read.pixels) == (dims, lower, upper, 32)


def test_tiled_maps_stay_tiled():
    assert not isinstance(decode_map(encode_tiled(U16, 0, (64, 4), (128,), (8, 2))), Im2colMap)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"lower": (-129, 0)}, "lower"),
        ({"upper": (-8, 0)}, "upper"),
        ({"pixels": 1025}, "pixels"),
        ({"box": (257,)}, "channels"),
        ({"box": (4,)}, "channels"),
        ({"dims": (16, 7), "strides": (32,)}, "dims"),
        ({"strides": (40, 224, 1120)}, "strides"),
        ({"lower": (3, 3), "upper": (-6, -4)}, "upper"),
    ],
)
def test_what_the_driver_refuses_is_refused(changes, argument):
    plain = {"dims": (16, 7, 5, 3), "lower": (-1, -1), "upper": (-1, -1), "box": (8,)}
    with pytest.raises(LaunchError, match=f"tensor map: {argument}"):
        encode_im2col(image_map(**plain | changes))


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
