"""`gather_operand`: a matrix in shared memory as the tensor core sees it through a descriptor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors.matrix_layout import CHUNK, Major, MatrixLayout, element_offsets
from ptxemu.descriptors.shared_memory import Tcgen05Descriptor, WgmmaDescriptor
from ptxemu.descriptors.swizzle import PERIOD


def operand_addresses(
    descriptor: WgmmaDescriptor | Tcgen05Descriptor,
    *,
    major: Major | str,
    shape: tuple[int, int],
    element_bytes: int,
) -> NDArray[np.int64]:
    """The shared memory address of the first byte of every element (mn, k).

    Args:
        descriptor: of one MMA's operand.
        major: "K" or "MN", which the descriptor does not say: wgmma's imm-trans and tcgen05's
            instruction descriptor do.
        shape: (rows of A or columns of B, K of one MMA).
        element_bytes: 1, 2 or 4.

    Raises:
        ValueError: the matrix is not made of whole 16-byte chunks.
    """
    major = Major(major)
    along = shape[1] if major is Major.K else shape[0]
    if element_bytes not in (1, 2, 4) or along * element_bytes % CHUNK:
        raise ValueError(
            f"shape: expected whole chunks of {CHUNK} bytes along {major.value}; got {along} "
            f"elements of {element_bytes} bytes"
        )
    start = descriptor.start_address
    lines = shape[0] if major is Major.K else shape[1]
    layout = MatrixLayout.of(descriptor, major, lines, along * element_bytes // CHUNK)
    return element_offsets(layout, element_bytes) + (start - start % PERIOD)


def gather_operand(
    image: NDArray[np.uint8],
    descriptor: WgmmaDescriptor | Tcgen05Descriptor,
    *,
    major: Major | str,
    shape: tuple[int, int],
    element_bytes: int,
    image_address: int = 0,
) -> NDArray[np.uint8]:
    """The bytes (mn, k, element_bytes) that an MMA reads through a descriptor.

    Args:
        image: bytes of shared memory from `image_address` on.
        descriptor, major, shape, element_bytes: as for `operand_addresses`.

    Raises:
        ValueError: the matrix reaches beyond the image.

    Example: a K-major bf16 tile of 64 rows, its first MMA's K = 16.
        raw = gather_operand(image, decode(bits, "tcgen05"), major="K", shape=(64, 16),
                             element_bytes=2)
        numbers = raw.view(np.uint16)[..., 0]
    """
    found = operand_addresses(descriptor, major=major, shape=shape, element_bytes=element_bytes)
    first = found - image_address
    if first.min() < 0 or first.max() + element_bytes > image.size:
        raise ValueError(
            f"image: the matrix takes shared memory {found.min():#x} to "
            f"{found.max() + element_bytes:#x}; the image has {image_address:#x} to "
            f"{image_address + image.size:#x}"
        )
    result: NDArray[np.uint8] = image[first[..., None] + np.arange(element_bytes)]
    return result
