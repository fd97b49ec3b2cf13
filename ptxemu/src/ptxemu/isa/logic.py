"""PTX ISA "Logic and Shift Instructions"."""

from __future__ import annotations

import numpy as np

from ptxemu.isa import forms
from ptxemu.isa.registry import Modifiers, pure, unsupported
from ptxemu.machine.decoded import PureOp
from ptxemu.numerics.dtypes import U4, U8, Array, constant
from ptxemu.syntax.ast import Instruction, Pair

_BITS = ("b16", "b32", "b64")
_THIRTY_TWO_U4 = constant(32, U4)
_THIRTY_TWO = constant(32, U8)
_FIVE_BITS = constant(31, U4)


def _bitwise(
    instruction: Instruction, modifiers: Modifiers, function: forms.Function, arity: int
) -> PureOp:
    type_ = modifiers.one_of("pred", *_BITS)
    return forms.elementwise(instruction, function, type_, arity)


_BITWISE = {"and": (np.bitwise_and, 2), "or": (np.bitwise_or, 2), "xor": (np.bitwise_xor, 2)}
forms.family(_bitwise, {**_BITWISE, "not": (np.invert, 1)})


@pure("cnot")
def cnot(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """1 if a is 0, else 0 ("...: cnot")."""
    type_ = modifiers.one_of(*_BITS)
    return forms.elementwise(instruction, lambda a: (a == 0).astype(a.dtype), type_, 1)


def table_function(table: int) -> forms.Function:
    """The function of three operands whose truth table has these 8 bits (lop3's immLut).

    Split by c: the table's even bits hold f(a, b, 0), the odd ones f(a, b, 1), and
    f(a, b, c) = f(a, b, 0) ^ (c & (f(a, b, 0) ^ f(a, b, 1))).
    """
    zero = sum((table >> (2 * bit) & 1) << bit for bit in range(4))
    one = sum((table >> (2 * bit + 1) & 1) << bit for bit in range(4))
    base, difference = _TWO_OPERANDS[zero], _TWO_OPERANDS[zero ^ one]
    if zero == one:
        return lambda a, b, c: base(a, b)
    return lambda a, b, c: base(a, b) ^ (c & difference(a, b))


_TWO_OPERANDS: dict[int, forms.Function] = {
    0b0000: lambda a, b: np.zeros_like(a),
    0b0001: lambda a, b: ~(a | b),
    0b0010: lambda a, b: ~a & b,
    0b0011: lambda a, b: ~a,
    0b0100: lambda a, b: a & ~b,
    0b0101: lambda a, b: ~b,
    0b0110: lambda a, b: a ^ b,
    0b0111: lambda a, b: ~(a & b),
    0b1000: lambda a, b: a & b,
    0b1001: lambda a, b: ~(a ^ b),
    0b1010: lambda a, b: b,
    0b1011: lambda a, b: ~a | b,
    0b1100: lambda a, b: a,
    0b1101: lambda a, b: a | ~b,
    0b1110: lambda a, b: a | b,
    0b1111: lambda a, b: ~np.zeros_like(a),
}
"""Functions of a and b by truth table: bit 2 * a + b."""


@pure("lop3")
def lop3(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """Any bitwise function of three operands, and whether the result is not 0 ("...: lop3")."""
    combine = modifiers.one_of("or", "and", default="")
    modifiers.one_of("b32")
    table = forms.immediate_of(instruction, 4)
    if not 0 <= table <= 255:
        unsupported(instruction, f"immLut: expected 0 to 255; got {table}")
    function = table_function(table)
    destination, *sources = instruction.operands
    if not combine:
        return forms.assemble(
            instruction,
            function,
            (destination,),
            ("b32",),
            (*sources[:3], *sources[4:]),
            ("b32",) * 3,
        )
    if not isinstance(destination, Pair):
        unsupported(instruction, "expected destinations d|p")
    join = np.logical_or if combine == "or" else np.logical_and

    def both(a: Array, b: Array, c: Array, q: Array) -> tuple[Array, Array]:
        result = function(a, b, c)
        return result, join(result != 0, q)

    return forms.assemble(
        instruction,
        both,
        (destination.first, destination.second),
        ("b32", "pred"),
        (*sources[:3], *sources[4:]),
        ("b32", "b32", "b32", "pred"),
    )


@pure("shf")
def shf(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The upper half of [b:a] shifted left, or the lower half shifted right ("...: shf")."""
    is_left = modifiers.one_of("l", "r") == "l"
    clamps = modifiers.one_of("clamp", "wrap") == "clamp"
    modifiers.one_of("b32")

    def function(a: Array, b: Array, c: Array) -> Array:
        count = (np.minimum(c, _THIRTY_TWO_U4) if clamps else c & _FIVE_BITS).astype(U8)
        both = (b.astype(U8) << _THIRTY_TWO) | a
        shifted = (both << count) >> _THIRTY_TWO if is_left else both >> count
        return shifted.astype(U4)

    return forms.elementwise(instruction, function, "b32", 3)


def _shift(instruction: Instruction, type_: str, function: forms.Function) -> PureOp:
    """A shift by the u32 operand b; NumPy gives zero, or the sign, from the width on, as PTX."""
    count = forms.immediate(instruction.operands[2]) if len(instruction.operands) == 3 else None
    width = forms.width_of(type_)
    if width == 32 or (count is not None and 0 <= count <= 64):
        return forms.build(instruction, function, type_, (type_, type_))

    dtype = np.dtype(f"{'i' if type_[0] == 's' else 'u'}{width // 8}")
    largest = constant(width, U4)
    by_register = lambda a, b: function(a, np.minimum(b, largest).astype(dtype))
    return forms.build(instruction, by_register, type_, (type_, "u32"))


@pure("shl")
def shl(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d = a << b, zero from the width on ("...: shl")."""
    type_ = modifiers.one_of(*_BITS)
    return _shift(instruction, type_, np.left_shift)


@pure("shr")
def shr(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d = a >> b, filled with the sign for signed types, else with zeros ("...: shr")."""
    type_ = modifiers.one_of(*_BITS, "u16", "u32", "u64", "s16", "s32", "s64")
    return _shift(instruction, type_, np.right_shift)
