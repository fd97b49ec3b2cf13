"""Messages between the stand-in and the emulator; `standin/standin.h` has the same numbers.

A message is a 64-bit operation, a 64-bit size and that many bytes; the answer a 64-bit status (a
cudaError_t), a 64-bit size and the bytes. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

HEAD = struct.Struct("<QQ")
ANSWER_HEAD = struct.Struct("<qQ")
_LAUNCH = struct.Struct("<Q12I")
_TENSOR_MAP = struct.Struct("<11Q16I")


class Operation(IntEnum):
    """Requests of the stand-in."""

    HELLO = 1
    MODULE = 2
    FUNCTION = 3
    LAUNCH = 4
    SYMBOL = 5
    GET_FUNCTION_ATTRIBUTE = 6
    SET_FUNCTION_ATTRIBUTE = 7
    OCCUPANCY = 8
    DEVICE_ATTRIBUTE = 9
    DEVICE_PROPERTIES = 10
    TENSOR_MAP = 11
    ALLOCATED = 12
    FREED = 13
    UNSUPPORTED = 14


class LaunchMessage(NamedTuple):
    """One launch, as the host code asked for it."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] | None
    shared_bytes: int
    is_cooperative: bool
    is_programmatic: bool
    """It may begin before the launch before it in its stream ends."""
    parameters: bytes
    """The parameter block."""


class TensorMapMessage(NamedTuple):
    """The arguments of cuTensorMapEncodeTiled."""

    data_type: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    fill: int


def read_launch(data: bytes) -> LaunchMessage:
    """The request of LAUNCH."""
    function, *numbers = _LAUNCH.unpack_from(data)
    gx, gy, gz, bx, by, bz, cx, cy, cz, shared_bytes, flags, size = numbers
    parameters = data[_LAUNCH.size : _LAUNCH.size + size]
    cluster = (cx, cy, cz) if cx else None
    grid, block, kinds = (gx, gy, gz), (bx, by, bz), (bool(flags & 1), bool(flags & 2))
    return LaunchMessage(function, grid, block, cluster, shared_bytes, *kinds, parameters)


def read_tensor_map(data: bytes) -> TensorMapMessage:
    """The request of TENSOR_MAP."""
    address, *numbers = _TENSOR_MAP.unpack_from(data)
    sizes, strides, box, steps = numbers[:5], numbers[5:10], numbers[10:15], numbers[15:20]
    data_type, rank, interleave, swizzle, l2_promotion, fill = numbers[20:26]
    return TensorMapMessage(
        data_type,
        address,
        tuple(sizes[:rank]),
        tuple(strides[: rank - 1]),
        tuple(box[:rank]),
        tuple(steps[:rank]),
        interleave,
        swizzle,
        l2_promotion,
        fill,
    )


def read_numbers(data: bytes, count: int) -> tuple[int, ...]:
    """The first `count` 64-bit numbers of a request."""
    return struct.unpack_from(f"<{count}q", data)


def int32(value: int) -> bytes:
    """An answer that is one 32-bit number."""
    return struct.pack("<i", value)
