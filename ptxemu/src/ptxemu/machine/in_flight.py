"""Registers that belong to an asynchronous operation: what happens when a warp touches them early.

Registers of a wgmma must not be touched before wgmma.wait_group: the first touch is reported. What
a tcgen05.ld loads should not be needed before tcgen05.wait::ld: the first visible instruction that
cannot do without it is reported. Pure instructions before the wait are not, for compilers move them
there, and the ISA keeps a true dependency on the registers; a touch makes the load's step happen.
That is no order of accesses to memory (PTX ISA, "Register dependencies, same thread"): what the
registers hold is followed through pure instructions, which hardware may execute at any later time.
"""

from __future__ import annotations

from collections.abc import Iterable

from ptxemu.machine.blocks import Block
from ptxemu.machine.state import AsyncOperation, Claim, Warp
from ptxemu.syntax.ast import Instruction, register_slots


def claim(
    warp: Warp, operation: AsyncOperation, results: Iterable[int], sources: Iterable[int] = ()
) -> None:
    """Registers (slots) belong to `operation` from now on."""
    warp.in_flight.update(dict.fromkeys(sources, Claim((operation,), is_result=False)))
    warp.in_flight.update(dict.fromkeys(results, Claim((operation,), is_result=True)))


def release(warp: Warp, operation: AsyncOperation, slots: Iterable[int]) -> None:
    """The registers of an operation that has been waited for are the warp's again."""
    in_flight = warp.in_flight
    if not in_flight:
        return
    for slot in slots:
        held = in_flight.get(slot)
        if held is None or operation not in held.operations:
            continue
        others = tuple([other for other in held.operations if other is not operation])
        if others:
            in_flight[slot] = Claim(others, held.is_result)
        else:
            del in_flight[slot]


def release_all(warp: Warp, operation: AsyncOperation) -> None:
    """All registers of an operation that has been waited for are the warp's again."""
    release(warp, operation, list(warp.in_flight))


def touch_block(warp: Warp, block: Block) -> None:
    """A block of pure instructions is about to run."""
    held_slots = warp.in_flight.keys()  # which asks for the few slots of the other set
    if held_slots.isdisjoint(block.registers):
        return
    for instruction, sources, results in block.slots:
        if held_slots.isdisjoint(sources) and held_slots.isdisjoint(results):
            continue
        origins: dict[AsyncOperation, None] = {}
        for slot in sources | results:
            held = warp.in_flight.get(slot)
            if held is None:
                continue
            if held.operation.kind == "wgmma":
                _touch_wgmma(warp, instruction, slot, held, is_write=slot in results)
                continue
            _finish(warp, held.operations)
            if slot in sources:
                _tell_touched(warp, held.operations)
                origins.update(dict.fromkeys(held.operations))
            elif instruction.guard is None and warp.group.mask.all():
                warp.in_flight.pop(slot, None)
        if origins and warp.cta.machine.observer is not None:
            derived = Claim(tuple(origins), is_result=True)
            warp.in_flight.update(dict.fromkeys(results, derived))


def touch_step(warp: Warp, instruction: Instruction) -> None:
    """A visible instruction is about to run."""
    if instruction.modifiers[0] == "wgmma":
        return
    for slot in register_slots(instruction.operands):
        held = warp.in_flight.get(slot)
        if held is None:
            continue
        if held.operation.kind == "wgmma":
            _touch_wgmma(warp, instruction, slot, held, is_write=False)
        elif instruction.modifiers[:2] == ("tcgen05", "ld"):  # into the registers of another
            _finish(warp, held.operations)
        else:
            _use(warp, instruction, held.operations)
    if instruction.guard is not None:
        touch_predicate(warp, instruction)


def touch_predicate(warp: Warp, instruction: Instruction) -> None:
    """A branch or a visible instruction under a predicate is about to run."""
    assert instruction.guard is not None
    held = warp.in_flight.get(instruction.guard.register.slot)
    if held is not None and held.operation.kind != "wgmma":
        _use(warp, instruction, held.operations)


def _finish(warp: Warp, operations: Iterable[AsyncOperation]) -> None:
    for operation in operations:
        while not operation.completed:
            warp.cta.machine.take_step(operation)


def _tell_touched(warp: Warp, operations: Iterable[AsyncOperation]) -> None:
    observer = warp.cta.machine.observer
    for operation in operations:
        if observer is not None and not operation.result_touched:
            operation.result_touched = True
            observer.async_result_touched(warp, operation)


def _use(warp: Warp, instruction: Instruction, operations: Iterable[AsyncOperation]) -> None:
    """The warp cannot go on without the registers that `operations` load."""
    _finish(warp, operations)
    _tell_touched(warp, operations)
    observer = warp.cta.machine.observer
    for operation in operations:
        release_all(warp, operation)
        if observer is None:
            continue
        message = (
            f"{instruction.opcode} needs what {operation.instruction.opcode} "
            f"({operation.instruction.span}) loads: needs tcgen05.wait::ld in between"
        )
        warp.cta.machine.complain("warning", "tmem-load-used-early", message, warp, instruction)
        observer.async_result_used(warp, operation)


def _touch_wgmma(
    warp: Warp, instruction: Instruction, slot: int, held: Claim, *, is_write: bool
) -> None:
    operation = held.operation
    if not (held.is_result or is_write) or instruction.guard is not None:
        return
    del warp.in_flight[slot]
    name = warp.program.function.registers[slot].name
    message = (
        f"{instruction.opcode} {'writes' if is_write else 'touches'} {name}, which "
        f"{operation.instruction.opcode} ({operation.instruction.span}) "
        f"{'writes' if held.is_result else 'reads'}: needs wgmma.wait_group in between"
    )
    warp.cta.machine.complain("error", "wgmma-register-in-flight", message, warp, instruction)
