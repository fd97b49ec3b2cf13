"""DLPack capsules: where their memory lies, and on which device they say it is."""

from __future__ import annotations

import ctypes
import struct
import sys
from dataclasses import dataclass
from typing import Any

CUDA = 2
_VERSIONED_HEADER_BYTES = 32
_DEVICE_TYPE_OFFSET = 8
_INTEGER_CODES = (0, 1)
_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype = ctypes.c_char_p
_get_name.argtypes = [ctypes.py_object]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes [start, end) that a tensor's elements lie in."""

    start: int
    end: int
    holds_int64: bool
    """Whether its elements are 64-bit integers."""


def _tensor_address(capsule: Any) -> int:
    """The address of the DLTensor in a capsule of either version."""
    name = _get_name(capsule)
    address = int(_get_pointer(capsule, name) or 0)
    if name is not None and name.endswith(b"_versioned"):
        address += _VERSIONED_HEADER_BYTES
    return address


def stands_on_device(value: Any) -> bool:
    """Whether the memory of a tensor is the GPU's: that of any, unless a script runs that asks for
    its tensors on "cuda"; then that of those which say so.
    """
    stand_in = sys.modules.get("ptxemu.cutedsl.device_tensors")
    if stand_in is None or not stand_in.DeviceTensors.is_pretending:
        return True
    if isinstance(value, sys.modules["torch"].Tensor):
        return bool(stand_in.is_marked(value))
    device = getattr(value, "__dlpack_device__", None)
    return device is not None and device()[0] == CUDA


def mark_as_device(capsule: Any) -> None:
    """Make the capsule say that its memory is on a CUDA device."""
    ctypes.c_int32.from_address(_tensor_address(capsule) + _DEVICE_TYPE_OFFSET).value = CUDA


def extent(capsule: Any) -> Extent:
    """Return the tensor's extent; with strides, it goes from the lowest to the highest element."""
    at = _tensor_address(capsule)
    data, _, _, rank, code, bits, lanes, shape_at, strides_at, offset = struct.unpack(
        "<QiiiBBHQQQ", ctypes.string_at(at, 48)
    )
    shape = struct.unpack(f"<{rank}q", ctypes.string_at(shape_at, 8 * rank)) if rank else ()
    if strides_at and rank:
        strides = struct.unpack(f"<{rank}q", ctypes.string_at(strides_at, 8 * rank))
    else:
        compact, product = [], 1
        for length in reversed(shape):
            compact.append(product)
            product *= length
        strides = tuple(reversed(compact))
    start = data + offset
    holds_int64 = code in _INTEGER_CODES and bits * lanes == 64
    if 0 in shape:
        return Extent(start, start, holds_int64)
    lowest = sum(s * (n - 1) for n, s in zip(shape, strides, strict=True) if s < 0)
    highest = sum(s * (n - 1) for n, s in zip(shape, strides, strict=True) if s > 0)
    width = bits * lanes
    end = start + -(-(highest + 1) * width // 8)
    return Extent(start + lowest * width // 8, end, holds_int64)
