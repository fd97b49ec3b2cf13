"""PTX ISA "Floating Point Instructions" on f32, f32x2 and f64: arithmetic, signs, min and max."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from ptxemu.isa.forms import Function, build, elementwise, family, overload
from ptxemu.isa.registry import Modifiers, pure, unsupported
from ptxemu.machine.decoded import PureOp
from ptxemu.numerics import exact
from ptxemu.numerics import rounding as rnd
from ptxemu.numerics.canonical import bits_of_f32, of_operand, quieted
from ptxemu.numerics.dtypes import F4, F8, U4, U8, Array, constant, split
from ptxemu.numerics.extremes import maximum, minimum, of_magnitudes, propagating
from ptxemu.syntax.ast import Instruction

MODES = ("rn", "rz", "rm", "rp")
_ONE_F4 = constant(1, F4)
_ONE_F8 = constant(1, F8)


class _Operation(NamedTuple):
    """An operation on f32 and on f64."""

    nearest: tuple[Function, Function]
    """Rounded to nearest even."""
    directed: tuple[Function, Function]
    """Rounded in any mode, given as the last argument."""
    nan_order: tuple[int, ...]
    """Operands of f64 in the order in which an H200 gives their NaN."""


def _minus(add: Function) -> Function:
    return lambda a, b, mode: add(a, -b, mode)


def _inverse(one: Array) -> Function:
    return lambda a: one / a


_OPERATIONS = {
    "add": _Operation((np.add, np.add), (rnd.add_f32_in, exact.add_f64_in), (1, 0)),
    "sub": _Operation(
        (np.subtract, np.subtract), (_minus(rnd.add_f32_in), _minus(exact.add_f64_in)), (1, 0)
    ),
    "mul": _Operation((np.multiply, np.multiply), (rnd.mul_f32_in, exact.mul_f64_in), (1, 0)),
    "div": _Operation((np.divide, np.divide), (rnd.div_f32_in, exact.div_f64_in), (0, 1)),
    "fma": _Operation((rnd.fma_f32, exact.fma_f64), (rnd.fma_f32_in, exact.fma_f64), (1, 2, 0)),
    "rcp": _Operation(
        (_inverse(_ONE_F4), _inverse(_ONE_F8)),
        (
            lambda a, mode: rnd.div_f32_in(_ONE_F4, a, mode),
            lambda a, mode: exact.div_f64_in(np.ones_like(a), a, mode),
        ),
        (0,),
    ),
    "sqrt": _Operation((np.sqrt, np.sqrt), (rnd.sqrt_f32_in, exact.sqrt_f64_in), (0,)),
}
_LARGE_DIVISOR = constant(2.0**126, F4)


def operation(name: str, type_: str, mode: str) -> Function:
    """The operation on f32 or f64 that rounds once in `mode`."""
    known, is_f64 = _OPERATIONS[name], type_ == "f64"
    function = known.nearest[is_f64]
    if mode != "rn":
        function = partial(known.directed[is_f64], mode=mode)
    return of_operand(function, known.nan_order) if is_f64 else function


def flushing(function: Function) -> Function:
    """f32 with subnormal operands and results replaced by zeros (.ftz)."""
    return lambda *operands: rnd.flush_f32(function(*map(rnd.flush_f32, operands)))


def saturating(function: Function) -> Function:
    """Results clamped to [0, 1] (.sat)."""
    return lambda *operands: rnd.saturate(function(*operands))


def paired(function: Function, arity: int) -> Function:
    """f32x2: both halves of 64-bit operands."""
    if arity == 2:
        return lambda a, b: bits_of_f32(function(split(a, F4), split(b, F4))).view(U8)
    return lambda a, b, c: bits_of_f32(function(split(a, F4), split(b, F4), split(c, F4))).view(U8)


def _arithmetic(instruction: Instruction, modifiers: Modifiers, name: str, arity: int) -> PureOp:
    """An operation with {.rnd}{.ftz}{.sat}: which of them, its syntax says by type."""
    type_ = modifiers.type()
    if type_ not in ("f32", "f64") and (arity == 1 or type_ != "f32x2"):
        unsupported(instruction, f"there is no {instruction.modifiers[0]} of type .{type_}")
    element = "f32" if type_ == "f32x2" else type_
    default = "rn" if name in ("add", "sub", "mul") else None
    function = operation(name, element, modifiers.one_of(*MODES, default=default))
    if element == "f32" and modifiers.flag("ftz"):
        function = flushing(function)
    if type_ == "f32" and name in ("add", "sub", "mul", "fma") and modifiers.flag("sat"):
        function = saturating(function)
    if type_ == "f32x2":
        return elementwise(instruction, paired(function, arity), "b64", arity)
    return elementwise(instruction, function, type_, arity)


_SUMS = {"add": ("add", 2), "sub": ("sub", 2), "mul": ("mul", 2), "fma": ("fma", 3)}
family(_arithmetic, _SUMS, "f32", "f32x2", "f64")
family(_arithmetic, {"mad": ("fma", 3)}, "f32", "f64")  # from sm_20 on


@overload("div", ("f32", "f64"))
def div(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d = a / b, rounded, or approximate: here then rounded to nearest as well ("...: div").

    .approx gives 0 for divisors above 2^126 (NaN for infinity by them): it multiplies by 1 / b.
    """
    is_f32 = instruction.modifiers[-1] == "f32"
    approximate = is_f32 and modifiers.one_of("approx", "full", default="")
    if not approximate:
        return _arithmetic(instruction, modifiers, "div", 2)
    modifiers.type()
    function: Function = _approximate_quotient if approximate == "approx" else np.divide
    if modifiers.flag("ftz"):
        function = flushing(function)
    return elementwise(instruction, function, "f32", 2)


def _approximate_quotient(a: Array, b: Array) -> Array:
    result = a / b
    large = (np.abs(b) > _LARGE_DIVISOR) & np.isfinite(b)
    if np.count_nonzero(large):
        result = np.where(large, a * np.copysign(F4.type(0), b), result)
    return result


def _root_like(
    instruction: Instruction, modifiers: Modifiers, opcode: str, nearest: Function
) -> PureOp:
    """1 / a and the square root; approximate forms are rounded to nearest here."""
    if not modifiers.flag("approx"):
        return _arithmetic(instruction, modifiers, opcode, 1)
    type_ = modifiers.type()
    ftz = modifiers.flag("ftz")
    if type_ == "f32":
        return elementwise(instruction, flushing(nearest) if ftz else nearest, "f32", 1)
    if (opcode, type_, ftz) != ("rcp", "f64", True):
        unsupported(instruction, f"an approximation of type .{type_}")
    return elementwise(instruction, upper_half(lambda a: _ONE_F8 / a), "f64", 1)


_ROOTS = {"rcp": ("rcp", operation("rcp", "f32", "rn")), "sqrt": ("sqrt", np.sqrt)}
family(_root_like, _ROOTS)


def upper_half(function: Function) -> Function:
    """.approx.ftz.f64: of operand and result only the upper 32 bits count; subnormals are zero.

    H200: every NaN is 0x7fffffff00000000.
    """

    def apply(a: Array) -> Array:
        result: Array = function(_flush_f64(_upper(a)))
        # The result has 20 bits of mantissa: rounded, and then cut.
        rounded = result.view(U8) + np.where(np.isfinite(result), _HALF_OF_UPPER, 0)
        upper = _flush_f64(_upper(rounded.astype(U8).view(F8)))
        return np.where(upper != upper, _UPPER_NAN, upper)

    return apply


_HALF_OF_UPPER = constant(1 << 31, U8)
_UPPER = constant(0xFFFFFFFF00000000, U8)
_UPPER_NAN = constant(0x7FFFFFFF00000000, U8).view(F8)
_SMALLEST_NORMAL = constant(2.0**-1022, F8)


def _upper(values: Array) -> Array:
    return (values.view(U8) & _UPPER).view(F8)


def _flush_f64(values: Array) -> Array:
    return np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(0.0, values), values)


def _sign(instruction: Instruction, modifiers: Modifiers, function: Function) -> PureOp:
    """abs and neg of numbers; an f64 NaN keeps its sign."""
    type_ = modifiers.type()
    ftz = type_ == "f32" and modifiers.flag("ftz")
    if ftz:
        return elementwise(instruction, lambda a: function(rnd.flush_f32(a)), "f32", 1)
    if type_ == "f64":
        on_f64 = lambda a: np.where(a != a, quieted(a), function(a))
        return elementwise(instruction, on_f64, "f64", 1)
    return elementwise(instruction, function, "f32", 1)


family(_sign, {"abs": (np.abs,), "neg": (np.negative,)}, "f32", "f64")


@pure("copysign")
def copysign(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The value of b with the sign of a ("...: copysign")."""
    type_ = modifiers.one_of("f32", "f64")
    sign = constant(1 << 31, U4) if type_ == "f32" else constant(1 << 63, U8)
    function = lambda a, b: (a & sign) | (b & ~sign)
    return elementwise(instruction, function, "b32" if type_ == "f32" else "b64", 2)


_PROPERTIES: dict[str, Function] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: a == a,
    "notanumber": lambda a: a != a,
    "normal": lambda a: np.isfinite(a) & ~_is_subnormal(a),
    "subnormal": lambda a: _is_subnormal(a),
}


def _is_subnormal(values: Array) -> Array:
    result: Array = (values != 0) & (np.abs(values) < np.finfo(values.dtype).tiny)
    return result


@pure("testp")
def testp(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """Whether a number is finite, infinite, NaN, normal (as zero is), subnormal ("...: testp")."""
    type_ = modifiers.one_of("f32", "f64")
    test = modifiers.one_of(*_PROPERTIES)
    return build(instruction, _PROPERTIES[test], "pred", (type_,))


def _extreme(instruction: Instruction, modifiers: Modifiers, choose: Function) -> PureOp:
    """min and max of two, of f32 also of three: -0 is below +0.

    NaN yields to a number unless .NaN is there. H200: of two f64 NaN it is the second one, its
    quiet bit set.
    """
    type_ = modifiers.type()
    arity = max(len(instruction.operands) - 1, 2)
    function = choose
    if type_ == "f32":
        ftz = modifiers.flag("ftz")
        if modifiers.flag("NaN"):
            function = propagating(choose)
        pair = function
        if arity == 3:
            function = lambda a, b, c: pair(pair(a, b), c)
        xors = arity == 2 and modifiers.flag("xorsign")
        if modifiers.flag("abs"):
            if not xors and arity == 2:
                unsupported(instruction, "modifier .abs is not known")
            function = of_magnitudes(function, xors=xors)
        elif xors:
            unsupported(instruction, ".xorsign without .abs")
        if ftz:
            function = flushing(function)
    if type_ == "f64":
        return elementwise(instruction, of_operand(choose, (1,)), "f64", 2)
    return elementwise(instruction, function, "f32", arity)


family(_extreme, {"min": (minimum,), "max": (maximum,)}, "f32", "f64")
