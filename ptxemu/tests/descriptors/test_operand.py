"""`gather_operand`: matrices written by hand into canonical layouts come back in logical order."""

import numpy as np
import pytest

from ptxemu.descriptors import (
    Swizzle,
    Tcgen05Descriptor,
    WgmmaDescriptor,
    gather_operand,
    operand_addresses,
)

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
