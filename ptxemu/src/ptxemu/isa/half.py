"""PTX ISA "Half Precision Floating Point Instructions", and those of mixed precision."""

from __future__ import annotations

from functools import partial

import numpy as np

from ptxemu.isa.floating import MODES, operation, saturating
from ptxemu.isa.forms import Function, build, elementwise, family
from ptxemu.isa.registry import Modifiers, unsupported
from ptxemu.machine.decoded import PureOp
from ptxemu.numerics import bf16, f16
from ptxemu.numerics.canonical import bits_of_f16
from ptxemu.numerics.dtypes import F2, F4, U2, U4, Array, constant, split
from ptxemu.numerics.extremes import maximum, minimum, of_magnitudes, propagating
from ptxemu.numerics.rounding import saturate
from ptxemu.syntax.ast import Instruction

TYPES = ("f16", "f16x2", "bf16", "bf16x2")
_OOB_NAN = constant(0xFFFF, U2)
_SIGN = constant(0x8000, U2)


def _on_bf16(function: Function) -> Function:
    """A float32 operation on bf16: float32 has bits enough that rounding twice is exact."""
    return lambda *operands: bf16.narrow(function(*map(bf16.widen, operands)))


_OPERATIONS: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _operation(name: str, element: str, mode: str) -> Function:
    if name == "fma":
        return f16.fma if element == "f16" else partial(bf16.fma, mode=mode)
    operation = _OPERATIONS[name]  # NumPy computes float16 in float32, and so rounds as one does
    return operation if element == "f16" else _on_bf16(operation)


def _flushing(function: Function) -> Function:
    return lambda *operands: f16.flush(function(*map(f16.flush, operands)))


def _clamped(function: Function, element: str) -> Function:
    """Negative results become +0, NaN the canonical one (.relu)."""

    def apply(*operands: Array) -> Array:
        bits = function(*operands).view(U2)
        magnitude = bits & ~_SIGN
        is_nan = magnitude > (0x7C00 if element == "f16" else 0x7F80)
        result = np.where(bits & _SIGN != 0, U2.type(0), bits)
        return np.where(is_nan, U2.type(f16.NAN), result).view(F2 if element == "f16" else U2)

    return apply


def _without_oob(function: Function, element: str) -> Function:
    """0 where an operand is the out-of-bounds NaN, all ones (.oob)."""

    def apply(*operands: Array) -> Array:
        outside = np.logical_or.reduce([operand.view(U2) == _OOB_NAN for operand in operands])
        result = function(*operands).view(U2)
        return np.where(outside, U2.type(0), result).view(F2 if element == "f16" else U2)

    return apply


def _build(instruction: Instruction, function: Function, type_: str, arity: int) -> PureOp:
    if not type_.endswith("x2"):
        return elementwise(instruction, function, type_, arity)
    if type_ == "f16x2":
        packed = lambda *operands: bits_of_f16(function(*(split(a, F2) for a in operands))).view(U4)
    else:
        packed = lambda *operands: function(*(split(a, U2) for a in operands)).view(U4)
    return elementwise(instruction, packed, "b32", arity)


def _arithmetic(instruction: Instruction, modifiers: Modifiers, name: str, arity: int) -> PureOp:
    """Rounded once; fma with .relu is not below 0, with .oob 0 by an OOB NaN."""
    type_ = modifiers.type()
    element = type_.removesuffix("x2")
    modes = ("rn", "rz") if (name, element) == ("fma", "bf16") else ("rn",)
    mode = modifiers.one_of(*modes, default=None if name == "fma" else "rn")
    function = _operation(name, element, mode)
    is_oob = name == "fma" and modifiers.flag("oob")
    if element == "f16":
        if not is_oob and modifiers.flag("ftz"):
            function = _flushing(function)
        if modifiers.flag("sat"):
            plain = function
            function = lambda *operands: saturate(plain(*operands))
    if name == "fma" and modifiers.flag("relu"):
        function = _clamped(function, element)
    if is_oob:
        function = _without_oob(function, element)
    return _build(instruction, function, type_, arity)


_ARITIES = {"add": ("add", 2), "sub": ("sub", 2), "mul": ("mul", 2), "fma": ("fma", 3)}
family(_arithmetic, _ARITIES, *TYPES)


def _sign(instruction: Instruction, modifiers: Modifiers, function: Function) -> PureOp:
    type_ = modifiers.type()
    on_halves = function if type_.startswith("f16") else _on_bf16(function)
    if type_.startswith("f16") and modifiers.flag("ftz"):
        on_halves = lambda a: function(f16.flush(a))
    return _build(instruction, on_halves, type_, 1)


family(_sign, {"neg": (np.negative,), "abs": (np.abs,)}, *TYPES)


def _extreme(instruction: Instruction, modifiers: Modifiers, choose: Function) -> PureOp:
    """min and max, -0 being below +0."""
    type_ = modifiers.type()
    element = type_.removesuffix("x2")
    function = propagating(choose) if modifiers.flag("NaN") else choose
    if modifiers.flag("xorsign"):
        if not modifiers.flag("abs"):
            unsupported(instruction, ".xorsign without .abs")
        function = of_magnitudes(function, xors=True)
    if element == "f16" and modifiers.flag("ftz"):
        function = _flushing(function)
    return _build(instruction, _on_bf16(function) if element == "bf16" else function, type_, 2)


family(_extreme, {"min": (minimum,), "max": (maximum,)}, *TYPES)


def widened(type_: str) -> Function:
    """Return the function that turns a half of a type into float32."""
    return bf16.widen if type_ == "bf16" else (lambda a: a.astype(F4))


# PTX ISA "Mixed Precision Floating Point Instructions": f32 arithmetic on half operands.

_MIXED = ("f32.f16", "f32.bf16")


def _mixed(instruction: Instruction, modifiers: Modifiers, opcode: str, halves: int) -> PureOp:
    """a + c, a - c or a * b + c of f32, the first `halves` operands being halves."""
    half = modifiers.type()
    modifiers.one_of("f32")
    default = None if opcode == "fma" else "rn"
    function = operation(opcode, "f32", modifiers.one_of(*MODES, default=default))
    if modifiers.flag("sat"):
        function = saturating(function)
    widen = widened(half)
    mixed: Function = lambda *operands: function(*map(widen, operands[:-1]), operands[-1])
    return build(instruction, mixed, "f32", (half,) * halves + ("f32",))


family(_mixed, {"add": ("add", 1), "sub": ("sub", 1), "fma": ("fma", 2)}, *_MIXED)
