"""PTX ISA "Extended-Precision Integer Arithmetic Instructions": the carry flag.

CC.CF is a register that these instructions read and write without naming it, so they are steps on
the warp and not pure functions. A subtraction adds the complement, as the hardware does (measured
on an H200): after it CC.CF is 1 where it did not borrow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptxemu.isa.forms import Function
from ptxemu.isa.integer import high_product
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lanes import WARP_SIZE, Mask, merged
from ptxemu.machine.operands import reader, writer
from ptxemu.machine.state import Warp
from ptxemu.numerics.dtypes import Array
from ptxemu.syntax.ast import Instruction

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
