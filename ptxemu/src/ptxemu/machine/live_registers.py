"""Registers whose values matter at a place: some path reads them before it writes them."""

from __future__ import annotations

from collections.abc import Iterator

from ptxemu.machine.blocks import Block
from ptxemu.machine.program import BranchNode, ExitNode, Program, SwitchNode
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction, register_slots

_WITH_RESULT = frozenset(("ld", "atom"))
"""Opcodes of visible instructions whose first operand is written in all lanes that execute them."""


class LiveRegisters:
    """The registers of a kernel that matter, by pc; of visible instructions most count as read."""

    def __init__(self, program: Program) -> None:
        instructions = program.function.instructions
        count = len(instructions)
        reads: list[set[int]] = [set() for _ in instructions]
        writes: list[set[int]] = [set() for _ in instructions]
        for pc, instruction in enumerate(instructions):
            reads[pc], writes[pc] = _of_visible(instruction)
        for node in program.nodes:
            for instruction, op in node.code if isinstance(node, Block) else ():
                written = set(register_slots(op.destinations))
                read = set(register_slots(op.sources))
                reads[instruction.pc], writes[instruction.pc] = _guarded(instruction, read, written)
        self._live: list[set[int]] = [set() for _ in range(count + 1)]
        following = [list(_following(program, pc)) for pc in range(count)]
        changed = True
        while changed:
            changed = False
            for pc in reversed(range(count)):
                behind = set[int]().union(*(self._live[after] for after in following[pc]))
                now = reads[pc] | (behind - writes[pc])
                if now != self._live[pc]:
                    self._live[pc], changed = now, True
        self._sorted = [sorted(live) for live in self._live]

    def fingerprint(self, warp: Warp) -> tuple[object, ...]:
        """Equal where the warp's lanes stand at the same places and go on alike."""
        registers = warp.registers
        places = tuple((group.pc, group.mask.tobytes()) for group in warp.groups)
        live = {slot for group in warp.groups for slot in self._sorted[group.pc]}
        return places, tuple(registers[slot].tobytes() for slot in sorted(live))


def _of_visible(instruction: Instruction) -> tuple[set[int], set[int]]:
    first, rest = instruction.operands[:1], instruction.operands[1:]
    if instruction.modifiers[0] not in _WITH_RESULT:
        return _guarded(instruction, {*register_slots(first), *register_slots(rest)}, set())
    return _guarded(instruction, set(register_slots(rest)), set(register_slots(first)))


def _guarded(
    instruction: Instruction, read: set[int], written: set[int]
) -> tuple[set[int], set[int]]:
    """Lanes whose guard does not hold keep what was there."""
    if instruction.guard is None:
        return read, written
    return read | written | {instruction.guard.register.slot}, set()


def _following(program: Program, pc: int) -> Iterator[int]:
    node = program.nodes[pc]
    if isinstance(node, BranchNode):
        yield node.target
        if node.guard is not None:
            yield pc + 1
    elif isinstance(node, SwitchNode):
        yield from node.targets
        yield pc + 1
    elif not isinstance(node, ExitNode) or node.guard is not None:
        yield pc + 1
