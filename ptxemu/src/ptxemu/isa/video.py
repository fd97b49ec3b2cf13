"""PTX ISA "Video Instructions", scalar and SIMD, on whole registers.

No kernel of today needs them to be fast: they work lane by lane on Python's integers. Operands with
selectors (`r1.b0`) or signs (`-r1`) are not there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from ptxemu.isa.forms import Function, build
from ptxemu.isa.registry import Modifiers, pure, unsupported
from ptxemu.machine.decoded import PureOp
from ptxemu.numerics.dtypes import U4, Array
from ptxemu.syntax.ast import Instruction

IntFunction = Callable[..., int]

_OPERATIONS: dict[str, IntFunction] = {
    "vadd": operator.add,
    "vsub": operator.sub,
    "vabsdiff": lambda a, b: abs(a - b),
    "vmin": min,
    "vmax": max,
    "vavrg": lambda a, b: (a + b + (a + b >= 0)) >> 1,
}
_COMPARISONS: dict[str, IntFunction] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_SECONDARY: dict[str, IntFunction] = {"add": operator.add, "min": min, "max": max}


def as_integer(bits: int, width: int, signed: bool) -> int:
    """The low `width` bits of a number, signed or not."""
    bits &= (1 << width) - 1
    return bits - (1 << width) if signed and bits >> (width - 1) else bits


def _clamped(value: int, width: int, signed: bool) -> int:
    low = -(1 << (width - 1)) if signed else 0
    return max(low, min(low + (1 << width) - 1, value))


def _lane_by_lane(function: IntFunction) -> Function:
    """A function of Python integers, of u32 lanes to u32 lanes."""

    def apply(*operands: Array) -> Array:
        rows = zip(*(operand.tolist() for operand in operands), strict=True)
        return np.array([function(*row) & 0xFFFFFFFF for row in rows], U4)

    return apply


def _is_signed(instruction: Instruction, modifiers: Modifiers) -> bool:
    """Take the last type, which must be u32 or s32."""
    type_ = modifiers.type()
    if type_ not in ("u32", "s32"):
        unsupported(instruction, f"expected .u32 or .s32; got .{type_}")
    return type_ == "s32"


@pure("vadd", "vsub", "vabsdiff", "vmin", "vmax")
def scalar_arithmetic(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d = a op b, clamped with .sat, and then with c by a second operation ("...: vadd")."""
    name = instruction.modifiers[0]
    types, saturates, second = _scalar_form(instruction, modifiers)
    operation = _OPERATIONS[name]
    return _scalar(instruction, lambda a, b: operation(a, b), types, saturates, second)


@pure("vshl", "vshr")
def scalar_shift(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d = a shifted by b, clamped to 32 or modulo 32, and then as vadd ("...: vshl, vshr")."""
    name = instruction.modifiers[0]
    clamps = modifiers.one_of("clamp", "wrap") == "clamp"
    types, saturates, second = _scalar_form(instruction, modifiers)
    shift = operator.lshift if name == "vshl" else operator.rshift
    operation = lambda a, b: shift(a, min(b, 32) if clamps else b & 31)
    return _scalar(instruction, operation, types, saturates, second)


def _scalar_form(
    instruction: Instruction, modifiers: Modifiers
) -> tuple[tuple[bool, bool, bool], bool, str]:
    """Signedness of d, a and b; .sat; the second operation."""
    saturates = modifiers.flag("sat")
    second = modifiers.one_of(*_SECONDARY, default="")
    b, a, d = (_is_signed(instruction, modifiers) for _ in range(3))
    return (d, a, b), saturates, second


def _scalar(
    instruction: Instruction,
    operation: IntFunction,
    types: tuple[bool, bool, bool],
    saturates: bool,
    second: str,
) -> PureOp:
    d_signed, a_signed, b_signed = types

    def function(a: int, b: int, *c: int) -> int:
        result = operation(as_integer(a, 32, a_signed), as_integer(b, 32, b_signed))
        result = (_clamped if saturates else as_integer)(result, 32, d_signed)
        return _SECONDARY[second](result, as_integer(c[0], 32, d_signed)) if second else result

    arity = 3 if second else 2
    return build(instruction, _lane_by_lane(function), "b32", ("b32",) * arity)


@pure("vset")
def scalar_comparison(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """1 or 0, and then with c by a second operation ("...: vset")."""
    second = modifiers.one_of(*_SECONDARY, default="")
    compare = _COMPARISONS[modifiers.one_of(*_COMPARISONS)]
    b, a = (_is_signed(instruction, modifiers) for _ in range(2))
    return _scalar(instruction, lambda x, y: int(compare(x, y)), (False, a, b), False, second)


@pure("vmad")
def scalar_product(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d = (a * b + c) shifted right, plus one before that with .po ("...: vmad")."""
    saturates, plus_one = modifiers.flag("sat"), modifiers.flag("po")
    shift = int(modifiers.one_of("shr7", "shr15", default="shr0")[3:])
    b_signed, a_signed, _ = (_is_signed(instruction, modifiers) for _ in range(3))
    signed = a_signed or b_signed

    def function(a: int, b: int, c: int) -> int:
        product = as_integer(a, 32, a_signed) * as_integer(b, 32, b_signed)
        result = (product + as_integer(c, 32, signed) + plus_one) >> shift
        return _clamped(result, 32, signed) if saturates else result

    return build(instruction, _lane_by_lane(function), "b32", ("b32",) * 3)


_SIMD = [f"{name}{parts}" for name in _OPERATIONS for parts in (2, 4)]


def _parts(word: int, count: int, signed: bool) -> list[int]:
    width = 32 // count
    return [as_integer(word >> (width * i), width, signed) for i in range(count)]


def _simd(
    instruction: Instruction, each: IntFunction, count: int, types: tuple[bool, bool], adds: bool
) -> PureOp:
    width = 32 // count
    a_signed, b_signed = types

    def function(a: int, b: int, c: int) -> int:
        pairs = zip(_parts(a, count, a_signed), _parts(b, count, b_signed), strict=True)
        results = [each(x, y) for x, y in pairs]
        if adds:
            return c + sum(results)
        return sum((part & ((1 << width) - 1)) << (width * i) for i, part in enumerate(results))

    return build(instruction, _lane_by_lane(function), "b32", ("b32",) * 3)


@pure(*_SIMD)
def simd_arithmetic(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d's halves or bytes = a's op b's, clamped with .sat; with .add c plus all ("...: vadd4")."""
    name = instruction.modifiers[0]
    adds = modifiers.flag("add")
    saturates = not adds and modifiers.flag("sat")
    b, a, d = (_is_signed(instruction, modifiers) for _ in range(3))
    operation, count = _OPERATIONS[name[:-1]], int(name[-1])
    width = 32 // count
    each = lambda x, y: _clamped(operation(x, y), width, d) if saturates else operation(x, y)
    return _simd(instruction, each, count, (a, b), adds)


@pure("vset2", "vset4")
def simd_comparison(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """1 or 0 in each half or byte; with .add their number plus c ("...: vset4")."""
    name = instruction.modifiers[0]
    adds = modifiers.flag("add")
    compare = _COMPARISONS[modifiers.one_of(*_COMPARISONS)]
    b, a = (_is_signed(instruction, modifiers) for _ in range(2))
    each = lambda x, y: int(compare(x, y))
    return _simd(instruction, each, int(name[-1]), (a, b), adds)
