"""PTX ISA "Mixed Precision Floating Point Instructions": f32 arithmetic on half operands."""

from __future__ import annotations

from ptxemu.isa.floating import MODES, operation, saturating
from ptxemu.isa.forms import Function, build, family
from ptxemu.isa.half import widened
from ptxemu.isa.registry import Modifiers
from ptxemu.machine.decoded import PureOp
from ptxemu.syntax.ast import Instruction

TYPES = ("f32.f16", "f32.bf16")


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


family(_mixed, {"add": ("add", 1), "sub": ("sub", 1), "fma": ("fma", 2)}, *TYPES)
