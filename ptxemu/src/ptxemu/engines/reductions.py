"""Reductions that copies perform: memory's elements combined with those that arrive.

What NaN, zeros and subnormals do was recorded on an H200 (`tests/engines/copies.npz`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxemu.numerics import bf16, f16
from ptxemu.numerics.atomic import add_f64_in_global
from ptxemu.numerics.dtypes import Array
from ptxemu.numerics.extremes import maximum, minimum
from ptxemu.numerics.rounding import canonical_f32, flush_f32

Combine = Callable[[Array, Array], Array]
"""New bytes from the bytes in memory and those that arrive; arrays of any shape, contiguous."""

_INTEGERS = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}
_BITS = {"b32": np.uint32, "b64": np.uint64, "u32": np.uint32, "s32": np.uint32, "u64": np.uint64}
_CANONICAL_HALF = np.uint16(0x7FFF)


def reduction(operation: str, type_: str) -> Combine | None:
    """Return the operation on bytes that are elements of `type_`; None if hardware lacks it.

    Args:
        operation: add, min, max, inc, dec, and, or, xor.
        type_: u32, s32, u64, s64, b32, b64, f16, bf16, f32, f32.ftz, f64 (and tf32 as f32).
    """
    type_ = {"tf32": "f32", "tf32.ftz": "f32.ftz"}.get(type_, type_)
    if operation == "add" and type_ in _ADDITIONS:
        return _ADDITIONS[type_]
    if operation in ("min", "max") and type_ in _INTEGERS:
        return _integer_extreme(operation, type_)
    if operation in ("min", "max") and type_ in ("f16", "bf16"):
        return _half_extreme(operation, type_)
    if operation in ("inc", "dec") and type_ == "u32":
        return _increment if operation == "inc" else _decrement
    if operation in ("and", "or", "xor") and type_ in _BITS:
        return _bitwise(operation, type_)
    return None


def _integer_add(type_: str) -> Combine:
    dtype = np.dtype(_INTEGERS[type_])
    return lambda held, arriving: (held.view(dtype) + arriving.view(dtype)).view(np.uint8)


def _add_f16(held: Array, arriving: Array) -> Array:
    # The float32 sum of two float16 rounds to float16 as the exact sum would.
    a, b = (x.view(np.float16).astype(np.float32) for x in (held, arriving))
    return f16.narrow(a + b).view(np.uint8)


def _add_bf16(held: Array, arriving: Array) -> Array:
    a, b = (bf16.widen(x.reshape(-1).view(np.uint16)) for x in (held, arriving))
    return bf16.narrow(a + b).view(np.uint8).reshape(held.shape)


def _add_f32(held: Array, arriving: Array) -> Array:
    return canonical_f32(held.view(np.float32) + arriving.view(np.float32)).view(np.uint8)


def _add_f32_ftz(held: Array, arriving: Array) -> Array:
    a, b = (flush_f32(x.view(np.float32)) for x in (held, arriving))
    return canonical_f32(flush_f32(a + b)).view(np.uint8)


def _add_f64(held: Array, arriving: Array) -> Array:
    return add_f64_in_global(held.view(np.uint64), arriving.view(np.uint64)).view(np.uint8)


_ADDITIONS: dict[str, Combine] = {
    **{type_: _integer_add(type_) for type_ in ("u32", "s32", "u64")},
    "f16": _add_f16,
    "bf16": _add_bf16,
    "f32": _add_f32,
    "f32.ftz": _add_f32_ftz,
    "f64": _add_f64,
}


def _integer_extreme(operation: str, type_: str) -> Combine:
    dtype = np.dtype(_INTEGERS[type_])
    function = np.minimum if operation == "min" else np.maximum
    return lambda held, arriving: function(held.view(dtype), arriving.view(dtype)).view(np.uint8)


def _half_extreme(operation: str, type_: str) -> Combine:
    function = minimum if operation == "min" else maximum

    def of_f16(held: Array, arriving: Array) -> Array:
        result = function(held.view(np.float16), arriving.view(np.float16))
        return np.where(result != result, _CANONICAL_HALF, result.view(np.uint16)).view(np.uint8)

    def of_bf16(held: Array, arriving: Array) -> Array:
        a, b = (bf16.widen(x.reshape(-1).view(np.uint16)) for x in (held, arriving))
        return bf16.narrow(function(a, b)).view(np.uint8).reshape(held.shape)

    return of_f16 if type_ == "f16" else of_bf16


def _increment(held: Array, arriving: Array) -> Array:
    """Up to the arriving limit, then 0."""
    a, b = held.view(np.uint32), arriving.view(np.uint32)
    return np.where(a >= b, np.uint32(0), a + np.uint32(1)).view(np.uint8)


def _decrement(held: Array, arriving: Array) -> Array:
    """Down to 0, then the arriving limit; the limit also for what is above it."""
    a, b = held.view(np.uint32), arriving.view(np.uint32)
    return np.where((a == 0) | (a > b), b, a - np.uint32(1)).view(np.uint8)


def _bitwise(operation: str, type_: str) -> Combine:
    dtype = np.dtype(_BITS[type_])
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation]

    def combine(held: Array, arriving: Array) -> Array:
        result: Array = function(held.view(dtype), arriving.view(dtype)).view(np.uint8)
        return result

    return combine
