"""Every bit field that this package knows: `decode`, `encode`; and a descriptor's matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors import instruction
from ptxemu.descriptors.matrix_layout import CHUNK, Major, MatrixLayout, element_offsets
from ptxemu.descriptors.shared_memory import Tcgen05Descriptor, WgmmaDescriptor
from ptxemu.descriptors.swizzle import PERIOD
from ptxemu.descriptors.tensor_map import TensorMap, decode_map
from ptxemu.descriptors.tensor_map_bits import TENSOR_MAP_BYTES
from ptxemu.descriptors.zero_mask import ZeroColumnMask


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


AnyDescriptor: TypeAlias = (
    WgmmaDescriptor
    | Tcgen05Descriptor
    | instruction.InstructionDescriptor
    | instruction.BlockScaledInstructionDescriptor
    | ZeroColumnMask
    | TensorMap
)

_OF_64_BITS: dict[str, Callable[[int], AnyDescriptor]] = {
    "wgmma": WgmmaDescriptor.decode,
    "tcgen05": Tcgen05Descriptor.decode,
    "zero_mask": ZeroColumnMask.decode,
}
DESCRIPTORS = (*_OF_64_BITS, "instruction", "tensor_map")
"""Descriptors that `decode` knows."""


def decode(value: int | bytes, what: str, *, kind: str | None = None) -> AnyDescriptor:
    """The fields of a descriptor as a dataclass, whose `encode()` gives `value` again.

    Args:
        value: an int of 64 bits, of 32 for "instruction", signed or not; the 128 bytes of a tensor
            map.
        what: "wgmma" or "tcgen05": the descriptor of a matrix in shared memory; "instruction": that
            of a tcgen05.mma; "zero_mask": that of tcgen05.mma.ws; "tensor_map": a CUtensorMap,
            tiled or im2col.
        kind: for "instruction" the .kind of the MMA: "f16", "tf32", "f8f6f4", "i8", "mxf8f6f4",
            "mxf4" or "mxf4nvf4"; its bits mean nothing without.

    Raises:
        ValueError: no such `what` or kind, a value that does not fit, or bits that mean nothing.
    """
    if what not in DESCRIPTORS:
        raise ValueError(f"what: expected one of {', '.join(DESCRIPTORS)}; got {what!r}")
    if (kind is not None) != (what == "instruction"):
        raise ValueError(
            f"kind: an instruction descriptor needs one of {', '.join(instruction.KINDS)}, others "
            f"none; got {kind!r} for {what}"
        )
    if what == "tensor_map":
        if not isinstance(value, bytes) or len(value) != TENSOR_MAP_BYTES:
            raise ValueError(f"value: expected the {TENSOR_MAP_BYTES} bytes of a tensor map")
        return decode_map(value)
    if not isinstance(value, int):
        raise ValueError(f"value: expected an int for {what}; got {type(value).__name__}")
    bits = 32 if what == "instruction" else 64
    if not -(1 << bits - 1) <= value < 1 << bits:
        raise ValueError(f"value: expected {bits} bits for {what}; got {value:#x}")
    value &= (1 << bits) - 1
    if kind is not None:
        if kind not in instruction.KINDS:
            raise ValueError(f"kind: expected one of {', '.join(instruction.KINDS)}; got {kind!r}")
        return instruction.decode_instruction(value, kind)
    return _OF_64_BITS[what](value)


def encode(descriptor: AnyDescriptor) -> int | bytes:
    """The bits of a descriptor: an int, or the 128 bytes of a tensor map.

    Raises:
        ValueError: a field that does not fit, or that the kind does not have.
    """
    return descriptor.encode()
