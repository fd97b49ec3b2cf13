"""Reductions that copies perform: memory's elements combined with those that arrive.

What NaN, zeros and subnormals do was recorded on an H200 (`tests/engines/copies.npz`).
"""

from __future__ import annotations

from collections.abc import Callable

from ptxemu.numerics import atomic
from ptxemu.numerics.dtypes import U1, Array

Combine = Callable[[Array, Array], Array]
"""New bytes from the bytes in memory and those that arrive; arrays of any shape, contiguous."""

_EXTREMES = ("u32", "s32", "u64", "s64", "f16", "bf16")
_TYPES = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f32.ftz", "f64"),
    **dict.fromkeys(("min", "max"), _EXTREMES),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64", "u32", "s32", "u64")),
}
"""Types that an operation is of."""


def reduction(operation: str, type_: str) -> Combine | None:
    """Return the operation on bytes that are elements of `type_`; None if hardware lacks it.

    Args:
        operation: add, min, max, inc, dec, and, or, xor.
        type_: u32, s32, u64, s64, b32, b64, f16, bf16, f32, f32.ftz, f64 (and tf32 as f32).
    """
    type_ = type_.replace("tf32", "f32")
    if type_ not in _TYPES[operation]:
        return None
    element = f"b{type_[1:]}" if operation in ("and", "or", "xor") else type_.removesuffix(".ftz")
    is_exact = type_ == "f32"  # an atomic addition to global memory flushes subnormals
    find = atomic.operation if is_exact else atomic.operation_in_global
    function, word = find(operation, element), atomic.WORDS[element]
    assert function is not None

    def combine(held: Array, arriving: Array) -> Array:
        return function(held.view(word), arriving.view(word)).view(U1)

    return combine
