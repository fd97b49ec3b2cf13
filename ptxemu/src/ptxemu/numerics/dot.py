"""Matrix products of the tensor cores: operand formats to numbers, and how results accumulate.

The rule, for every kind: operands become float64 exactly; one instruction's products are summed in
float64; the sum is added to the accumulator in float64 and rounded once, to nearest even, to the
accumulator's type (f32 or f16). A float64 holds the exact sum of an instruction's products unless
their exponents differ by more than about 30, so results hardly depend on the order of summation.
Hardware aligns the products to the largest exponent and truncates (H100 keeps about 25 bits, 14
for fp8 with wgmma), so random data agree within a bound and small integers exactly. Integers are
exact; int32 accumulators wrap around, or are clamped with .satfinite.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxemu.numerics.dtypes import F2, F4, F8, I4, I8, U1, U2, U4, Array
from ptxemu.numerics.minifloat import E2M1, E2M3, E3M2, E4M3, E5M2

_BYTES = np.arange(256)
_TABLES: dict[str, Array] = {
    "e4m3": E4M3.decode(_BYTES).astype(F8),
    "e5m2": E5M2.decode(_BYTES).astype(F8),
    "u8": _BYTES.astype(F8),
    "s8": _BYTES.astype(U1).view(np.int8).astype(F8),
}
_NARROW_TABLES: dict[str, Array] = {
    "e2m3": E2M3.decode(np.arange(64)).astype(F8),
    "e3m2": E3M2.decode(np.arange(64)).astype(F8),
    "e2m1": E2M1.decode(np.arange(16)).astype(F8),
}
_SCALES: dict[str, Array] = {
    "ue8m0": np.where(_BYTES == 255, np.nan, np.ldexp(1.0, _BYTES - 127)),
    "ue4m3": E4M3.decode(_BYTES & 0x7F).astype(F8),
}
_NIBBLES = np.stack([_NARROW_TABLES["e2m1"][_BYTES & 15], _NARROW_TABLES["e2m1"][_BYTES >> 4]], 1)
_LOW_AND_HIGH = np.stack([_BYTES & 15, _BYTES >> 4], 1)
_INTEGER_NIBBLES: dict[str, Array] = {
    "u4": _LOW_AND_HIGH.astype(F8),
    "s4": ((_LOW_AND_HIGH ^ 8) - 8).astype(F8),
}
_TF32_MASK = np.array(0xFFFFE000, dtype=U4)
_SIXTEEN = np.array(16, dtype=U4)
_CANONICAL_NAN = {"f32": np.uint32(0x7FFFFFFF), "f16": np.uint32(0x7FFF)}

BITS = {
    "f64": 64,
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    **dict.fromkeys(("e4m3", "e5m2", "s8", "u8"), 8),
    **dict.fromkeys(("e2m3", "e3m2"), 6),
    **dict.fromkeys(("e2m1", "s4", "u4"), 4),
    "b1": 1,
}
"""Width of the types of A and B."""
_PADDED = ("e2m3", "e3m2", "e2m1")


def elements_per_chunk(type_: str, packing: str = "natural") -> int:
    """Elements that 16 bytes hold: of a narrow type 16 if padded or in containers."""
    if packing == "nibbles":
        return 32
    return 16 if type_ in _PADDED else 128 // BITS[type_]


def numbers(raw: Array, type_: str, packing: str = "natural") -> Array:
    """The float64 numbers in bytes (..., n).

    Args:
        raw: contiguous uint8.
        type_: f64, f16, bf16, tf32, e4m3, e5m2, s8, u8, e2m3, e3m2, e2m1, s4, u4 or b1.
        packing: of types narrower than 8 bits: "padded": 16 elements lie packed at the start of 16
            bytes (shared memory); "containers": one a byte, e2m1 in its bits 2 to 5 (TMEM);
            "nibbles": two e2m1 a byte, the first one low.
    """
    if type_ == "bf16":
        return (raw.view(U2).astype(U4) << _SIXTEEN).view(F4).astype(F8)
    if type_ == "f16":
        return raw.view(F2).astype(F8)
    if type_ == "tf32":
        return (raw.view(U4) & _TF32_MASK).view(F4).astype(F8)
    table = _TABLES.get(type_)
    if table is not None:
        return table.take(raw)
    if type_ in _INTEGER_NIBBLES:
        return _INTEGER_NIBBLES[type_].take(raw, axis=0).reshape(*raw.shape[:-1], -1)
    if type_ == "b1":
        return np.unpackbits(raw, axis=-1, bitorder="little").astype(F8)
    if type_ == "f64":
        return raw.view(F8)
    if packing == "nibbles":
        return _NIBBLES.take(raw, axis=0).reshape(*raw.shape[:-1], 2 * raw.shape[-1])
    codes = padded_codes(raw, BITS[type_]) if packing == "padded" else raw
    if packing == "containers" and type_ == "e2m1":
        codes = codes >> 2
    return _NARROW_TABLES[type_].take(codes & ((1 << BITS[type_]) - 1))


def padded_codes(raw: Array, bits: int) -> Array:
    """Codes (..., n) of 16 elements of `bits` bits at the start of each 16 bytes."""
    chunks = raw.reshape(-1, 16)[:, : 2 * bits]
    flat = np.unpackbits(chunks, axis=1, bitorder="little").reshape(-1, 16, bits)
    codes = np.packbits(flat, axis=2, bitorder="little")[:, :, 0]
    return codes.reshape(raw.shape)


def scales(raw: Array, type_: str) -> Array:
    """The float64 scale factors in bytes: ue8m0 or ue4m3."""
    return _SCALES[type_].take(raw)


def product(a: Array, b: Array) -> Array:
    """A (m, k) times B, given as (n, k): the sums in float64, (m, n)."""
    result: Array = a @ b.T
    return result


BIT_PRODUCTS: dict[str, Callable[[Array, Array], Array]] = {
    "xor": lambda a, b: product(a, 1 - b) + product(1 - a, b),
    "and": product,
}
"""Counts of the bits of k that an operation leaves of a row and a column."""


def accumulated(
    before: Array | None, sums: Array, type_: str, *, scale: float = 1.0, saturate: bool = False
) -> Array:
    """D after one instruction, as 32-bit cells (f16 in the low half, the high half zero).

    Args:
        before: D as 32-bit cells, or None where the instruction does not read it.
        sums: the instruction's products, summed.
        type_: f32, f16 or s32.
        scale: D is multiplied by it first; saturate: s32 is clamped.
    """
    if type_ == "s32":
        return _accumulated_integers(before, sums, saturate)
    total = sums
    if before is not None:
        old = before.view(F4) if type_ == "f32" else before.astype(U2).view(F2)
        total = old * scale + sums if scale != 1.0 else old + sums
    rounded = total.astype(F4 if type_ == "f32" else F2)
    cells = rounded.view(U4) if type_ == "f32" else rounded.view(U2).astype(U4)
    if rounded.size and np.isnan(np.maximum.reduce(rounded, axis=None)):  # a maximum keeps NaNs
        cells[np.isnan(rounded)] = _CANONICAL_NAN[type_]
    return cells


def _accumulated_integers(before: Array | None, sums: Array, saturate: bool) -> Array:
    total = sums.astype(I8)
    if before is not None:
        total = total + before.view(I4)
    if saturate:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(I4).view(U4)
