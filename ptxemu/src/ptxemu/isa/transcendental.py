"""PTX ISA "Floating Point Instructions" that approximate: rsqrt, sin, cos, lg2, ex2, tanh.

The ISA gives error bounds, not results. Here each is the float64 result rounded to nearest: within
every bound, though not the bits of any hardware.
"""

from __future__ import annotations

import numpy as np

from ptxemu.isa.floating import flushing, upper_half
from ptxemu.isa.forms import Function, elementwise, family, overload
from ptxemu.isa.registry import Modifiers, pure, unsupported
from ptxemu.machine.decoded import PureOp
from ptxemu.numerics import bf16, f16
from ptxemu.numerics.dtypes import F2, F4, F8, U2, U4, Array, constant, split
from ptxemu.syntax.ast import Instruction

_HALVES = ("f16", "f16x2", "bf16", "bf16x2")
_SMALLEST_NORMAL = constant(2.0**-126, F4)
_ZERO = constant(0, F4)
_LOWEST_EXPONENT = constant(-126, F4)


def through_f64(function: Function) -> Function:
    """A float64 function on float32, rounded once."""
    return lambda a: function(a.astype(F8)).astype(F4)


def _inverse_root(a: Array) -> Array:
    return 1.0 / np.sqrt(a)


_exp2 = through_f64(np.exp2)


def _exp2_ftz(a: Array) -> Array:
    """A subnormal operand gives 1 anyway; a subnormal result comes from operands below -126."""
    result: Array = np.exp2(a.astype(F8)).astype(F4)
    small = a < _LOWEST_EXPONENT
    if np.count_nonzero(small):
        np.putmask(result, small, _ZERO)
    return result


def _approximation(instruction: Instruction, modifiers: Modifiers, function: Function) -> PureOp:
    """.approx{.ftz}.f32"""
    modifiers.expect("approx", "f32")
    ftz = modifiers.flag("ftz")
    rounded = through_f64(function)
    return elementwise(instruction, flushing(rounded) if ftz else rounded, "f32", 1)


family(_approximation, {"sin": (np.sin,), "cos": (np.cos,), "lg2": (np.log2,)})


@pure("rsqrt")
def rsqrt(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """1 / sqrt(a): infinite with its sign for a zero ("...: rsqrt")."""
    if instruction.modifiers[-1] != "f64":
        return _approximation(instruction, modifiers, _inverse_root)
    modifiers.expect("approx", "f64")
    function = upper_half(_inverse_root) if modifiers.flag("ftz") else _inverse_root
    return elementwise(instruction, function, "f64", 1)


@overload("ex2", ("f32",))
def ex2(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """2 to the power a ("...: ex2")."""
    modifiers.expect("approx", "f32")
    function = _exp2_ftz if modifiers.flag("ftz") else _exp2
    return elementwise(instruction, function, "f32", 1)


@overload("tanh", ("f32",))
def tanh(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The hyperbolic tangent ("...: tanh")."""
    modifiers.expect("approx", "f32")
    return elementwise(instruction, through_f64(np.tanh), "f32", 1)


def _half_function(type_: str, function: Function) -> Function:
    """A float64 function on halves of a type, each rounded once."""
    if type_ == "f16":
        return lambda a: f16.narrow(function(a.astype(F8)))
    if type_ == "bf16":
        return lambda a: bf16.narrow(through_f64(function)(bf16.widen(a)))
    single = _half_function(type_[:-2], function)
    dtype = F2 if type_ == "f16x2" else U2
    return lambda a: single(split(a, dtype)).view(U4)


@overload("ex2", _HALVES)
def ex2_half(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """2 to the power a; bf16 has .ftz and flushes subnormals ("Half Precision ...: ex2")."""
    modifiers.one_of("approx")
    type_ = modifiers.type()
    is_bf16 = type_.startswith("bf16")
    if is_bf16 and not modifiers.flag("ftz"):
        unsupported(instruction, "bf16 needs .ftz")
    function = _flushed_exp2 if is_bf16 else np.exp2
    return elementwise(instruction, _half_function(type_, function), type_, 1)


def _flushed_exp2(a: Array) -> Array:
    result: Array = np.exp2(a)
    return np.where(result < _SMALLEST_NORMAL, 0.0, result)


@overload("tanh", _HALVES)
def tanh_half(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """The hyperbolic tangent ("Half Precision ...: tanh")."""
    modifiers.one_of("approx")
    type_ = modifiers.type()
    return elementwise(instruction, _half_function(type_, np.tanh), type_, 1)
