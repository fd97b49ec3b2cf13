"""Results of atomic operations and reductions of an old value and an operand, on bits.

Every function takes and gives unsigned words of the type's width; packed types work on each half.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxemu.numerics import bf16, f16
from ptxemu.numerics.canonical import bits_of_f16, of_operand
from ptxemu.numerics.dtypes import F2, F4, F8, I4, I8, U2, U4, U8, Array
from ptxemu.numerics.extremes import maximum, minimum
from ptxemu.numerics.rounding import canonical_f32, flush_f32

Operation = Callable[[Array, Array], Array]
"""New words from old ones and operands; contiguous arrays of one shape."""


def _increment(old: Array, limit: Array) -> Array:
    result: Array = np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))
    return result


def _decrement(old: Array, limit: Array) -> Array:
    wraps: Array = (old == 0) | (old > limit)
    return np.where(wraps, limit, old - old.dtype.type(1))


def _exchange(old: Array, new: Array) -> Array:
    return new


def _viewed(function: Callable[..., Array], dtype: np.dtype[np.generic]) -> Operation:
    """`function` on words viewed as `dtype`."""

    def apply(old: Array, operand: Array) -> Array:
        result = function(old.ravel().view(dtype), operand.ravel().view(dtype))
        words: Array = result.view(old.dtype).reshape(old.shape)
        return words

    return apply


def _add_f32(old: Array, operand: Array) -> Array:
    return canonical_f32(old + operand)


def _on_f16(function: Callable[[Array, Array], Array]) -> Operation:
    return _viewed(lambda old, operand: bits_of_f16(function(old, operand)), F2)


def _add_f16(old: Array, operand: Array) -> Array:
    return f16.narrow(old.astype(F4) + operand.astype(F4))


def _on_bf16(function: Callable[[Array, Array], Array]) -> Operation:
    """A float32 function on bf16 codes; packed pairs are two codes."""

    def apply(old: Array, operand: Array) -> Array:
        a, b = (bf16.widen(np.ascontiguousarray(x).view(U2).ravel()) for x in (old, operand))
        return bf16.narrow(function(a, b)).view(old.dtype).reshape(old.shape)

    return apply


_INTEGERS: dict[str, dict[str, Operation]] = {
    "add": {t: np.add for t in ("u32", "s32", "u64", "s64")},
    "min": {
        "u32": np.minimum,
        "u64": np.minimum,
        "s32": _viewed(np.minimum, I4),
        "s64": _viewed(np.minimum, I8),
    },
    "max": {
        "u32": np.maximum,
        "u64": np.maximum,
        "s32": _viewed(np.maximum, I4),
        "s64": _viewed(np.maximum, I8),
    },
    "inc": {"u32": _increment},
    "dec": {"u32": _decrement},
    "and": {"b32": np.bitwise_and, "b64": np.bitwise_and},
    "or": {"b32": np.bitwise_or, "b64": np.bitwise_or},
    "xor": {"b32": np.bitwise_xor, "b64": np.bitwise_xor},
    "exch": {"b32": _exchange, "b64": _exchange, "b128": _exchange},
}
_FLOATS: dict[str, dict[str, Operation]] = {
    "add": {
        "f32": _viewed(_add_f32, F4),
        "f64": _viewed(of_operand(np.add, (0, 1)), F8),
        **{t: _viewed(_add_f16, F2) for t in ("f16", "f16x2")},
        **{t: _on_bf16(np.add) for t in ("bf16", "bf16x2")},
    },
    "min": {
        **{t: _on_f16(minimum) for t in ("f16", "f16x2")},
        **{t: _on_bf16(minimum) for t in ("bf16", "bf16x2")},
    },
    "max": {
        **{t: _on_f16(maximum) for t in ("f16", "f16x2")},
        **{t: _on_bf16(maximum) for t in ("bf16", "bf16x2")},
    },
}


def operation(name: str, type_: str) -> Operation | None:
    """The operation of a name (add, min, max, inc, dec, and, or, xor, exch) and a PTX type."""
    found = _INTEGERS.get(name, {}).get(type_)
    return found if found is not None else _FLOATS.get(name, {}).get(type_)


def operation_in_global(name: str, type_: str) -> Operation | None:
    """The same as global memory does it on an H200: elsewhere adding floats is a loop of cas."""
    if name == "add" and type_ in ("f32", "f64"):
        return _flushed_add_f32 if type_ == "f32" else add_f64_in_global
    return operation(name, type_)


def add_f64_in_global(old: Array, operand: Array) -> Array:
    """float64 add: a NaN goes through as it is, the operand's before the old one."""
    a, b = old.view(F8), operand.view(F8)
    total = np.where(a != a, old, (a + b).view(U8))
    return np.where(b != b, operand, total)


def _flushed_add_f32(old: Array, operand: Array) -> Array:
    """float32 add: subnormal operands and results become zeros."""
    total = flush_f32(old.ravel().view(F4)) + flush_f32(operand.ravel().view(F4))
    return flush_f32(canonical_f32(total)).view(U4).reshape(old.shape)


def compare_and_swap(old: Array, expected: Array, new: Array) -> Array:
    """`new` where `old` is `expected`; b128 words are columns of low and high halves."""
    equal = old == expected
    if old.ndim == 2:
        equal = equal.all(axis=0)
    return np.where(equal, new, old)


WORDS: dict[str, np.dtype[np.generic]] = {
    **{t: U2 for t in ("f16", "bf16", "b16")},
    **{t: U4 for t in ("u32", "s32", "b32", "f32", "f16x2", "bf16x2")},
    **{t: U8 for t in ("u64", "s64", "b64", "f64")},
}
"""The word of each type that has operations."""
