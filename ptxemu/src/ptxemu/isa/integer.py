"""PTX ISA "Integer Arithmetic Instructions" and "Extended-Precision Integer Arithmetic"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptxemu.isa.forms import Function, build, elementwise, family, select, width_of
from ptxemu.isa.registry import Modifiers, pure, unsupported, visible
from ptxemu.machine.decoded import PureOp, Step
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lanes import WARP_SIZE, Mask, merged
from ptxemu.machine.operands import reader, writer
from ptxemu.machine.state import Warp
from ptxemu.numerics.dtypes import I2, I4, I8, U2, U4, U8, Array, constant, split
from ptxemu.syntax.ast import Instruction

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
SIGNED = ("s16", "s32", "s64")
PACKED = ("u16x2", "s16x2")

_S32_MIN = constant(-(1 << 31), I8)
_S32_MAX = constant((1 << 31) - 1, I8)
_THIRTY_TWO = constant(32, U8)
_LOW_32 = constant(0xFFFFFFFF, U8)


def unsigned(type_: str) -> str:
    """The type whose arithmetic is the same but needs no signed view: s32 gives u32."""
    return "u" + type_[1:]


def saturated_s32(exact: Array) -> Array:
    """64-bit results clamped to the range of s32."""
    return np.minimum(np.maximum(exact, _S32_MIN), _S32_MAX).astype(I4)


def packed_16(function: Function, dtype: np.dtype[np.uint16] | np.dtype[np.int16]) -> Function:
    """`function` applied to both halves of 32-bit operands."""

    def apply(*operands: Array) -> Array:
        result: Array = function(*(split(operand, dtype) for operand in operands))
        return result.view(U4)

    return apply


def _add_sub(instruction: Instruction, modifiers: Modifiers, function: Function) -> PureOp:
    """a + b and a - b, wrapping, or clamped with .sat."""
    type_ = modifiers.type()
    if type_ in PACKED:
        return elementwise(instruction, packed_16(function, U2), "b32", 2)
    if type_ == "s32" and modifiers.flag("sat"):
        return elementwise(
            instruction, lambda a, b: saturated_s32(function(a.astype(I8), b.astype(I8))), "s32", 2
        )
    return elementwise(instruction, function, unsigned(type_), 2)


family(_add_sub, {"add": (np.add,)}, *INTEGERS, *PACKED)
family(_add_sub, {"sub": (np.subtract,)}, *INTEGERS)


def _wide_32(a: Array, b: Array) -> Array:
    return a.astype(I8) * b.astype(I8) if a.dtype.kind == "i" else a.astype(U8) * b.astype(U8)


def _wide_16(a: Array, b: Array) -> Array:
    return a.astype(I4) * b.astype(I4) if a.dtype.kind == "i" else a.astype(U4) * b.astype(U4)


def high_u64(a: Array, b: Array) -> Array:
    """Bits 127..64 of the unsigned product."""
    a_low, a_high = a & _LOW_32, a >> _THIRTY_TWO
    b_low, b_high = b & _LOW_32, b >> _THIRTY_TWO
    middle = a_high * b_low + ((a_low * b_low) >> _THIRTY_TWO)
    carry = (middle & _LOW_32) + a_low * b_high
    high: Array = a_high * b_high + (middle >> _THIRTY_TWO) + (carry >> _THIRTY_TWO)
    return high


def _high_s64(a: Array, b: Array) -> Array:
    ua, ub = a.view(U8), b.view(U8)
    high = high_u64(ua, ub)
    high = high - np.where(a < 0, ub, 0) - np.where(b < 0, ua, 0)
    return high.view(I8)


_HIGH: dict[str, Function] = {
    "u16": lambda a, b: (_wide_16(a, b) >> 16).astype(U2),
    "s16": lambda a, b: (_wide_16(a, b) >> 16).astype(I2),
    "u32": lambda a, b: (_wide_32(a, b) >> _THIRTY_TWO).astype(U4),
    "s32": lambda a, b: (_wide_32(a, b) >> 32).astype(I4),
    "u64": high_u64,
    "s64": _high_s64,
}
_WIDE: dict[str, Function] = {"u16": _wide_16, "s16": _wide_16, "u32": _wide_32, "s32": _wide_32}


def high_product(type_: str) -> Function:
    """The function that gives the upper half of a product."""
    return _HIGH[type_]


def _multiply(instruction: Instruction, modifiers: Modifiers, adds: bool) -> PureOp:
    """The lower half, the upper half or all of a * b, of mad plus c ("...: mul", "...: mad")."""
    type_ = modifiers.type()
    mode = modifiers.one_of("lo", "hi", *(["wide"] if type_ in _WIDE else []))
    product: Function
    if mode == "lo":
        product, type_, result_type = np.multiply, unsigned(type_), unsigned(type_)
    elif mode == "hi":
        product, result_type = _HIGH[type_], type_
    else:
        product, result_type = _WIDE[type_], f"{type_[0]}{2 * width_of(type_)}"
    if not adds:
        return build(instruction, product, result_type, (type_, type_))
    saturates = type_ == "s32" and mode == "hi" and modifiers.flag("sat")
    function = _plus(product, saturates=saturates)
    return build(instruction, function, result_type, (type_, type_, result_type))


def _plus(product: Function, *, saturates: bool) -> Function:
    if saturates:
        return lambda a, b, c: saturated_s32(product(a, b).astype(I8) + c)
    return lambda a, b, c: product(a, b) + c


family(_multiply, {"mul": (False,), "mad": (True,)}, *INTEGERS)


def _low_24(values: Array) -> Array:
    """The low 24 bits, sign-extended for signed types, in 64 bits."""
    if values.dtype.kind == "i":
        return (values << 8).astype(I8) >> 8
    return (values & 0xFFFFFF).astype(U8)


def _product_24(mode: str) -> Function:
    shift = 16 if mode == "hi" else 0

    def product(a: Array, b: Array) -> Array:
        full = _low_24(a) * _low_24(b)
        return (full >> constant(shift, full.dtype)).astype(a.dtype)

    return product


def _multiply_24(instruction: Instruction, modifiers: Modifiers, adds: bool) -> PureOp:
    """Bits 31..0 or 47..16 of the product of the low 24 bits ("...: mul24"), of mad24 plus c."""
    mode, type_ = modifiers.one_of("lo", "hi"), modifiers.one_of("u32", "s32")
    product = _product_24(mode)
    if not adds:
        return elementwise(instruction, product, type_, 2)
    saturates = type_ == "s32" and mode == "hi" and modifiers.flag("sat")
    return elementwise(instruction, _plus(product, saturates=saturates), type_, 3)


family(_multiply_24, {"mul24": (False,), "mad24": (True,)})


def _magnitude(values: Array) -> Array:
    if values.dtype.kind == "u":
        return values
    return np.abs(values).view(np.dtype(f"u{values.dtype.itemsize}"))


def quotient(a: Array, b: Array) -> Array:
    """a / b towards zero; all ones where b is 0, which the ISA leaves open and hardware gives."""
    upper, lower = _magnitude(a), _magnitude(b)
    by_zero = lower == 0
    result = (upper // np.maximum(lower, 1)).view(a.dtype)
    if a.dtype.kind == "i":
        result = select((a ^ b) < 0, -result, result)
    return select(by_zero, ~np.zeros_like(a), result)


def remainder(a: Array, b: Array) -> Array:
    """a - b * quotient, with the sign of a; all ones where b is 0 (see `quotient`)."""
    return select(b == 0, ~np.zeros_like(a), a - b * quotient(a, b))


def _sad(a: Array, b: Array, c: Array) -> Array:
    """c + |a - b|, wrapping ("...: sad")."""
    result: Array = c + (np.maximum(a, b) - np.minimum(a, b))
    return result


def _plain(
    instruction: Instruction, modifiers: Modifiers, function: Function, arity: int
) -> PureOp:
    """A function of operands of one type. Of abs and neg the smallest number stays."""
    return elementwise(instruction, function, modifiers.one_of(*INTEGERS), arity)


family(_plain, {"rem": (remainder, 2), "sad": (_sad, 3)})
family(_plain, {"div": (quotient, 2)}, *INTEGERS)
family(_plain, {"abs": (np.abs, 1), "neg": (np.negative, 1)}, *SIGNED)


def _extreme(instruction: Instruction, modifiers: Modifiers, function: Function) -> PureOp:
    """min and max, with .relu at least 0."""
    type_ = modifiers.type()
    relu = type_ in ("s32", "s16x2") and modifiers.flag("relu")
    chosen = (lambda a, b: np.maximum(function(a, b), a.dtype.type(0))) if relu else function
    if type_ in PACKED:
        return elementwise(instruction, packed_16(chosen, I2 if type_[0] == "s" else U2), "b32", 2)
    return elementwise(instruction, chosen, type_, 2)


_EXTREMES = {"min": (np.minimum,), "max": (np.maximum,)}
family(_extreme, _EXTREMES, *INTEGERS, *PACKED)


def _bytes(values: Array, signed: bool) -> Array:
    parts = split(values, np.dtype(np.int8 if signed else np.uint8))
    return parts.reshape(-1, 4).astype(I8)


def _dot(a: Array, b: Array, c: Array) -> Array:
    total: Array = (a * b).sum(axis=1) + c.astype(I8)
    return total.astype(U4)


def _dot_types(instruction: Instruction, modifiers: Modifiers) -> tuple[str, str]:
    b_type, a_type = modifiers.type(), modifiers.type()
    for type_ in (a_type, b_type):
        if type_ not in ("u32", "s32"):
            unsupported(instruction, f"expected types .u32 or .s32; got .{type_}")
    return b_type, a_type


@pure("dp4a")
def dp4a(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d = c + the dot product of four bytes ("...: dp4a")."""
    b_type, a_type = _dot_types(instruction, modifiers)
    a_signed, b_signed = a_type == "s32", b_type == "s32"
    function = lambda a, b, c: _dot(_bytes(a, a_signed), _bytes(b, b_signed), c)
    return elementwise(instruction, function, "b32", 3)


@pure("dp2a")
def dp2a(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d = c + the dot product of two half-words and two of four bytes ("...: dp2a")."""
    b_type, a_type = _dot_types(instruction, modifiers)
    first = 0 if modifiers.one_of("lo", "hi") == "lo" else 2
    a_dtype, b_signed = (I2 if a_type == "s32" else U2), b_type == "s32"

    def function(a: Array, b: Array, c: Array) -> Array:
        words = split(a, a_dtype).reshape(-1, 2).astype(I8)
        return _dot(words, _bytes(b, b_signed)[:, first : first + 2], c)

    return elementwise(instruction, function, "b32", 3)


# PTX ISA "Extended-Precision Integer Arithmetic Instructions": the carry flag.
#
# CC.CF is a register that these instructions read and write without naming it, so they are steps on
# the warp and not pure functions. A subtraction adds the complement, as the hardware does (measured
# on an H200): after it CC.CF is 1 where it did not borrow.

_TYPES = ("u32", "s32", "u64", "s64")
Operation = Callable[..., tuple[Array, Array]]


@dataclass(slots=True)
class _Carry:
    """A warp's CC.CF, one a lane."""

    flag: Array


_carry: EngineState[Warp, _Carry] = EngineState(lambda warp: _Carry(np.zeros(WARP_SIZE, np.bool_)))


def sum_with_carry(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    """a + b + carry, and whether that needs one bit more."""
    partial = a + b
    total = partial + carry
    return total, (partial < a) | (total < partial)


def difference_with_carry(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    """a - b, and 1 less without a carry; whether that is not negative."""
    return sum_with_carry(a, ~b, carry)


def _step(
    instruction: Instruction,
    operation: Operation,
    type_: str,
    *,
    carry_in: bool | None,
    gives_carry: bool,
) -> Step:
    """A step on unsigned numbers that adds `carry_in`, or CC.CF where that is None."""
    destination, *sources = instruction.operands
    unsigned = f"u{type_[1:]}"
    readers = [reader(source, unsigned) for source in sources]
    write = writer(destination)
    fixed = None if carry_in is None else np.full(WARP_SIZE, carry_in)

    def step(warp: Warp, mask: Mask) -> None:
        held = _carry(warp)
        old = held.flag
        values = [read(warp) for read in readers]
        result, carry = operation(*values, old if fixed is None else fixed)
        write(warp, result, mask)
        if gives_carry:
            held.flag = merged(mask, carry, old)

    return step


@visible("add.cc", "addc", "sub.cc", "subc")
def sum_with_flag(instruction: Instruction, modifiers: Modifiers) -> Step:
    """a + b and a - b with the carry flag in, out, or both; it is 0 where a - b borrows."""
    name = instruction.modifiers[0]
    takes_carry = name.endswith("c")
    gives_carry = not takes_carry or modifiers.flag("cc")
    type_ = modifiers.one_of(*_TYPES)
    if len(instruction.operands) != 3:
        unsupported(instruction, "expected three operands")
    operation = sum_with_carry if name.startswith("add") else difference_with_carry
    carry_in = None if takes_carry else operation is difference_with_carry
    return _step(instruction, operation, type_, carry_in=carry_in, gives_carry=gives_carry)


@visible("mad.lo.cc", "mad.hi.cc", "madc")
def product_with_flag(instruction: Instruction, modifiers: Modifiers) -> Step:
    """d = half of a * b, plus c, and of madc plus CC.CF ("...: mad.cc, madc")."""
    takes_carry = instruction.modifiers[0] == "madc"
    is_high = (modifiers.one_of("hi", "lo") if takes_carry else instruction.modifiers[1]) == "hi"
    gives_carry = not takes_carry or modifiers.flag("cc")
    type_ = modifiers.one_of(*_TYPES)
    if len(instruction.operands) != 4:
        unsupported(instruction, "expected four operands")
    signed, unsigned = np.dtype(f"{type_[0].replace('s', 'i')}{int(type_[1:]) // 8}"), type_[1:]
    half: Function = high_product(type_) if is_high else np.multiply

    def operation(a: Array, b: Array, c: Array, carry: Array) -> tuple[Array, Array]:
        product = half(a.view(signed), b.view(signed)).view(f"u{int(unsigned) // 8}")
        return sum_with_carry(product, c, carry)

    carry_in = None if takes_carry else False
    return _step(instruction, operation, type_, carry_in=carry_in, gives_carry=gives_carry)
