"""`decode` and `encode`: one name each for every bit field that this package knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ptxemu.descriptors import instruction
from ptxemu.descriptors.im2col_map import decode_map
from ptxemu.descriptors.shared_memory import Tcgen05Descriptor, WgmmaDescriptor
from ptxemu.descriptors.tensor_map import TensorMap
from ptxemu.descriptors.tensor_map_bits import TENSOR_MAP_BYTES
from ptxemu.descriptors.zero_mask import ZeroColumnMask

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
