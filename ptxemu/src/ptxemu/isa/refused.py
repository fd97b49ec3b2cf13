"""Instructions that ptxemu knows and does not have, refused with the reason."""

from __future__ import annotations

from ptxemu.isa.registry import unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.syntax.ast import Instruction


@visible(*("tex", "tld4", "txq", "suld", "sust", "sured", "suq", "istypep"))
def texture(instruction: Instruction) -> Step:
    """Textures and surfaces ("Texture Instructions", "Surface Instructions")."""
    unsupported(instruction, "textures and surfaces are not emulated")


@visible(*("alloca", "stacksave", "stackrestore"))
def stack(instruction: Instruction) -> Step:
    """A thread's stack ("Stack Manipulation Instructions")."""
    unsupported(instruction, "a stack of run-time size is not emulated; .local variables are")
