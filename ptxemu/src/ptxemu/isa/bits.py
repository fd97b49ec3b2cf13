"""PTX ISA "Integer Arithmetic Instructions": counting, finding, moving and masking bits."""

from __future__ import annotations

import numpy as np

from ptxemu.isa.forms import build, select
from ptxemu.isa.registry import Modifiers, pure
from ptxemu.machine.decoded import PureOp
from ptxemu.numerics.dtypes import F8, I8, U1, U4, U8, Array, constant, split
from ptxemu.syntax.ast import Instruction

_NONE = constant(0xFFFFFFFF, U4)
_BYTE = constant(0xFF, U4)
_FIVE_BITS = constant(31, U4)
_THIRTY_TWO = constant(32, U4)
_ALL_ONES = constant(0xFFFFFFFF, U4)
_SIXTY_FOUR = constant(64, U8)
_REVERSED = np.array([int(f"{byte:08b}"[::-1], 2) for byte in range(256)], U1)


@pure("popc")
def popc(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The number of one bits ("...: popc")."""
    type_ = modifiers.one_of("b32", "b64")
    return build(instruction, lambda a: np.bitwise_count(a).astype(U4), "u32", (type_,))


def bit_length(values: Array) -> Array:
    """One more than the position of the highest one bit, 0 for 0 (u32 of u32 or u64)."""
    if values.dtype == U4:
        return np.frexp(values.astype(F8))[1].view(U4)
    upper = (values >> constant(32, U8)).astype(U4)
    in_upper = bit_length(upper) + _THIRTY_TWO
    return select(upper != 0, in_upper, bit_length(values.astype(U4)))


@pure("clz")
def clz(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The number of leading zero bits ("...: clz")."""
    type_ = modifiers.one_of("b32", "b64")
    width = constant(int(type_[1:]), U4)
    return build(instruction, lambda a: width - bit_length(a), "u32", (type_,))


@pure("bfind")
def bfind(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The place of the highest bit that is no sign bit, or its shift to the left ("...: bfind")."""
    is_shift = modifiers.flag("shiftamt")
    type_ = modifiers.one_of("u32", "s32", "u64", "s64")
    highest = constant(int(type_[1:]) - 1, U4)
    unsigned = np.dtype(f"u{int(type_[1:]) // 8}")

    def function(a: Array) -> Array:
        magnitude = select(a < 0, ~a, a).view(unsigned)
        place = bit_length(magnitude) - constant(1, U4)
        return select(magnitude == 0, _NONE, highest - place) if is_shift else place

    return build(instruction, function, "u32", (type_,))


@pure("fns")
def fns(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The place of the n-th set bit of a mask from a base on, upwards or downwards ("...: fns")."""
    modifiers.one_of("b32")

    def function(mask: Array, base: Array, offset: Array) -> Array:
        rows = zip(mask.tolist(), base.tolist(), offset.tolist(), strict=True)
        return np.array([_find_nth(*row) for row in rows], U4)

    return build(instruction, function, "b32", ("b32", "u32", "s32"))


def _find_nth(mask: int, base: int, offset: int) -> int:
    if offset == 0:
        return base if base < 32 and mask >> base & 1 else 0xFFFFFFFF
    places = range(base, 32) if offset > 0 else range(min(base, 31), -1, -1)
    found = [place for place in places if mask >> place & 1]
    return found[abs(offset) - 1] if len(found) >= abs(offset) else 0xFFFFFFFF


@pure("brev")
def brev(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The bits in reverse order ("...: brev")."""
    type_ = modifiers.one_of("b32", "b64")
    function = lambda a: _REVERSED[split(a, U1)].view(a.dtype).byteswap()
    return build(instruction, function, type_, (type_,))


def _used_bits(type_: str) -> Array:
    """Return the bits that count of a field's position and length."""
    return _BYTE if type_[1:] == "32" else _ALL_ONES


@pure("bfe")
def bfe(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The bit field of `len` bits from `pos` on, zero- or sign-extended ("...: bfe").

    Bits beyond the operand's highest are its sign, or zero; the field's own sign is its last bit.
    Of `pos` and `len` the 32-bit forms use eight bits, the 64-bit forms all (measured on an H200).
    """
    type_ = modifiers.one_of("u32", "s32", "u64", "s64")
    signed, used = type_[0] == "s", _used_bits(type_)
    wide, narrow = (
        (I8 if signed else U8),
        np.dtype(f"{'i' if signed else 'u'}{int(type_[1:]) // 8}"),
    )

    def function(a: Array, position: Array, length: Array) -> Array:
        length = (length & used).astype(U8)
        # INVARIANT: shifting by 64 or more gives zero, or the sign, in NumPy.
        shifted = a.astype(wide) >> (position & used).astype(wide)
        unused = (_SIXTY_FOUR - np.minimum(length, _SIXTY_FOUR)).astype(wide)
        field = ((shifted << unused) >> unused).astype(narrow)
        return select(length == 0, np.zeros_like(field), field)

    return build(instruction, function, type_, (type_, "u32", "u32"))


@pure("bfi")
def bfi(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """b with `len` low bits of a inserted at `pos`, both used as bfe does ("...: bfi")."""
    type_ = modifiers.one_of("b32", "b64")
    used = _used_bits(type_)
    dtype = np.dtype(f"u{int(type_[1:]) // 8}")
    ones = constant((1 << int(type_[1:])) - 1, dtype)

    def function(a: Array, b: Array, position: Array, length: Array) -> Array:
        place = (position & used).astype(dtype)
        mask = ~(ones << (length & used).astype(dtype)) << place
        inserted: Array = (b & ~mask) | ((a << place) & mask)
        return inserted

    return build(instruction, function, type_, (type_, type_, "u32", "u32"))


@pure("szext")
def szext(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The low N bits, zero- or sign-extended ("...: szext")."""
    clamps = modifiers.one_of("clamp", "wrap") == "clamp"
    signed = modifiers.one_of("u32", "s32") == "s32"

    def function(a: Array, count: Array) -> Array:
        bits = count & _FIVE_BITS
        mask = _ALL_ONES << bits
        if clamps:
            mask = select(count >= _THIRTY_TWO, np.zeros_like(mask), mask)
        result = a & ~mask
        if signed:  # without bits, or with all of them, the mask adds no sign
            sign = (a >> ((bits - constant(1, U4)) & _FIVE_BITS)) & constant(1, U4)
            result = select((sign != 0) & (bits != 0), result | mask, result)
        return result

    return build(instruction, function, "b32", ("b32", "u32"))


@pure("bmsk")
def bmsk(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """A mask of `width` ones from bit `position` on ("...: bmsk")."""
    clamps = modifiers.one_of("clamp", "wrap") == "clamp"
    modifiers.one_of("b32")

    def function(position: Array, width: Array) -> Array:
        start = position & _FIVE_BITS
        below = _ALL_ONES << start
        # INVARIANT: shifting by 32 or more gives zero in NumPy: a sum beyond 31 clears the upper.
        above = _ALL_ONES << (start + (width & _FIVE_BITS))
        if clamps:
            below = select(position >= _THIRTY_TWO, np.zeros_like(below), below)
            above = select(width >= _THIRTY_TWO, np.zeros_like(above), above)
        return below & ~above

    return build(instruction, function, "b32", ("u32", "u32"))
