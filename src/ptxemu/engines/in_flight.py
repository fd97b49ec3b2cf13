"""Registers that belong to an asynchronous operation: what happens when a warp touches them early.

A tcgen05.ld writes its registers when its step is taken; the ISA respects a true dependency on
them without tcgen05.wait::ld, so a touch makes the step happen first. Registers of a wgmma must not
be touched before wgmma.wait_group: that is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ptxemu.syntax.ast import Address, NegatedRegister, Operand, Pair, Register, Vector

if TYPE_CHECKING:
    from ptxemu.engines.operation import AsyncOperation
    from ptxemu.machine.blocks import Block
    from ptxemu.machine.warp import Warp
    from ptxemu.syntax.ast import Instruction


@dataclass(frozen=True, slots=True)
class Claim:
    """An operation's claim on a register."""

    operation: AsyncOperation
    is_result: bool
    """The operation writes the register; otherwise it only reads it."""


def claim(
    warp: Warp, operation: AsyncOperation, results: Iterable[int], sources: Iterable[int] = ()
) -> None:
    """Registers (slots) belong to `operation` from now on."""
    for slot in sources:
        warp.in_flight[slot] = Claim(operation, is_result=False)
    for slot in results:
        warp.in_flight[slot] = Claim(operation, is_result=True)


def release(warp: Warp, operation: AsyncOperation, slots: Iterable[int]) -> None:
    """The registers of an operation that has been waited for are the warp's again."""
    for slot in slots:
        held = warp.in_flight.get(slot)
        if held is not None and held.operation is operation:
            del warp.in_flight[slot]


def release_all(warp: Warp, operation: AsyncOperation) -> None:
    """All registers of an operation that has been waited for are the warp's again."""
    release(warp, operation, list(warp.in_flight))


def touch_block(warp: Warp, block: Block) -> None:
    """A block of pure instructions is about to run."""
    if block.registers.isdisjoint(warp.in_flight):
        return
    for instruction, op in block.code:
        guards = [] if instruction.guard is None else [instruction.guard.register.slot]
        sources = {*_slots(op.sources), *guards}
        results = set(_slots(op.destinations))
        for slot in sources | results:
            held = warp.in_flight.get(slot)
            if held is not None:
                _touched(warp, instruction, slot, held, is_write=slot in results)


def touch_step(warp: Warp, instruction: Instruction) -> None:
    """A visible instruction is about to run."""
    if instruction.modifiers[0] == "wgmma":
        return
    for slot in _slots(instruction.operands):
        held = warp.in_flight.get(slot)
        if held is not None:
            _touched(warp, instruction, slot, held, is_write=False)


def _touched(
    warp: Warp, instruction: Instruction, slot: int, held: Claim, *, is_write: bool
) -> None:
    operation = held.operation
    if operation.kind != "wgmma":
        while not operation.completed:
            warp.cta.machine.take_step(operation)
        release_all(warp, operation)
        observer = warp.cta.machine.observer
        if observer is not None:
            observer.async_joined(warp, operation, False)
        return
    if not (held.is_result or is_write) or instruction.guard is not None:
        return
    del warp.in_flight[slot]
    name = warp.program.function.registers[slot].name
    warp.cta.machine.complain(
        "error",
        "wgmma-register-in-flight",
        f"{instruction.opcode} {'writes' if is_write else 'touches'} {name}, which "
        f"{operation.instruction.opcode} ({operation.instruction.span}) "
        f"{'writes' if held.is_result else 'reads'}: needs wgmma.wait_group in between",
        warp,
        instruction,
    )


def _slots(operands: Iterable[Operand]) -> Iterator[int]:
    for operand in operands:
        if isinstance(operand, Register):
            yield operand.slot
        elif isinstance(operand, NegatedRegister):
            yield operand.register.slot
        elif isinstance(operand, Vector):
            yield from _slots(operand.elements)
        elif isinstance(operand, Pair):
            yield from _slots((operand.first, operand.second))
        elif isinstance(operand, Address):
            yield from _slots((operand.base, *(operand.coordinates or ())))
