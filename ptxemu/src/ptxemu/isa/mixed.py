"""PTX ISA "Mixed Precision Floating Point Instructions": f32 arithmetic on half operands."""

from __future__ import annotations

from ptxemu.isa.floating import MODES, operation, saturating
from ptxemu.isa.forms import Function, build, family, overload
from ptxemu.isa.half import widened
from ptxemu.isa.registry import Modifiers
from ptxemu.machine.decoded import PureOp
from ptxemu.numerics.dtypes import Array
from ptxemu.syntax.ast import Instruction

TYPES = ("f32.f16", "f32.bf16")


def _form(modifiers: Modifiers, opcode: str) -> tuple[Function, str]:
    """The f32 operation, rounded and clamped as asked, and the type of the half operands."""
    half = modifiers.type()
    modifiers.one_of("f32")
    default = None if opcode == "fma" else "rn"
    function = operation(opcode, "f32", modifiers.one_of(*MODES, default=default))
    if modifiers.flag("sat"):
        function = saturating(function)
    return function, half


def _sum(instruction: Instruction, modifiers: Modifiers, opcode: str) -> PureOp:
    """a + c and a - c, a being a half."""
    function, half = _form(modifiers, opcode)
    widen = widened(half)
    mixed = lambda a, c: function(widen(a), c)
    return build(instruction, mixed, "f32", (half, "f32"))


family(_sum, {"add": ("add",), "sub": ("sub",)}, *TYPES)


@overload("fma", TYPES)
def fma(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d = a * b + c, a and b being halves ("...: fma")."""
    function, half = _form(modifiers, "fma")
    widen = widened(half)

    def mixed(a: Array, b: Array, c: Array) -> Array:
        result: Array = function(widen(a), widen(b), c)
        return result

    return build(instruction, mixed, "f32", (half, half, "f32"))
