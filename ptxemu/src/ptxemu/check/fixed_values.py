"""Stores whose value follows from the kernel's parameters and the threads' numbers alone.

Two threads that write the same with such stores do so whatever the data are. Where a value comes
from memory, or where data decide which of several assignments a register has got it from, equal
values are a matter of this run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ptxemu.machine.blocks import Block
from ptxemu.machine.program import BranchNode, Program, StepNode, SwitchNode
from ptxemu.syntax.ast import Instruction, Operand, SpecialRegister, register_slots

_OF_THE_MOMENT = ("%clock", "%globaltimer", "%smid", "%nsmid", "%warpid", "%gridid", "%pm")
"""Beginnings of special registers that are another thing in another run."""
_WITHOUT_RESULT = frozenset(("st", "red", "bar", "barrier", "fence", "membar", "nanosleep"))


class _Assignment(NamedTuple):
    """An instruction that gives a register a value."""

    instruction: Instruction
    read: set[int] | None
    """The registers that it computes the value with; None if it takes the value from memory."""


def _leave_a_choice(assignments: list[_Assignment]) -> bool:
    """Whether conditions decide the value of a register; several moves of one constant do not."""
    first = assignments[0]
    if any(one.instruction.guard is not None for one in assignments):
        return True
    does = first.instruction.modifiers, first.instruction.operands
    return len(assignments) > 1 and (
        bool(first.read)
        or any((one.instruction.modifiers, one.instruction.operands) != does for one in assignments)
    )


class FixedValues:
    """Finds those stores in a kernel; none in what is no Program."""

    def __init__(self, program: Any = None) -> None:
        self._assignments: dict[int, list[_Assignment]] = {}
        self._conditions: set[int] = set()
        """Registers that guard instructions and branches."""
        self._fixed: frozenset[int] = frozenset()
        if isinstance(program, Program):
            self._read(program)
            varying = self._varying()
            self._fixed = frozenset(
                one.pc
                for one in program.function.instructions
                if _values(one) and varying.isdisjoint(register_slots(_values(one)))
            )

    def is_fixed(self, instruction: Instruction) -> bool:
        """Whether a store's value has nothing to do with data."""
        return instruction.pc in self._fixed

    def _read(self, program: Program) -> None:
        for node in program.nodes:
            if isinstance(node, Block):
                for instruction, op in node.code:
                    sources = None if _is_of_the_moment(instruction) else op.sources
                    self._assign(instruction, op.destinations, sources)
            elif isinstance(node, StepNode):
                instruction = node.instruction
                if instruction.modifiers[0] not in _WITHOUT_RESULT:
                    self._assign(instruction, instruction.operands[:1], None)
            elif isinstance(node, BranchNode) and node.guard is not None:
                self._conditions.add(node.guard.register.slot)
            elif isinstance(node, SwitchNode):
                self._conditions.update(register_slots(node.instruction.operands))

    def _assign(
        self,
        instruction: Instruction,
        destinations: tuple[Operand, ...],
        sources: tuple[Operand, ...] | None,
    ) -> None:
        read = None if sources is None else set(register_slots(sources))
        for slot in register_slots(destinations):
            self._assignments.setdefault(slot, []).append(_Assignment(instruction, read))
        if instruction.guard is not None:
            self._conditions.add(instruction.guard.register.slot)

    def _varying(self) -> set[int]:
        """Registers whose values data decide."""
        varying: set[int] = set()
        chosen = {slot for slot, several in self._assignments.items() if _leave_a_choice(several)}
        before = -1
        while len(varying) != before:
            before = len(varying)
            if not varying.isdisjoint(self._conditions):
                varying |= chosen
            for slot, assignments in self._assignments.items():
                reads = [one.read for one in assignments]
                if any(read is None or not read.isdisjoint(varying) for read in reads):
                    varying.add(slot)
        return varying


def _values(instruction: Instruction) -> tuple[Operand, ...]:
    """The operands that name what an instruction writes; none for one that stores no registers."""
    if instruction.modifiers[:2] == ("mbarrier", "init"):
        return instruction.operands[1:]
    if instruction.modifiers[0] == "st" and "async" not in instruction.modifiers:
        return instruction.operands[1:]
    return ()


def _is_of_the_moment(instruction: Instruction) -> bool:
    return any(
        isinstance(one, SpecialRegister) and one.name.startswith(_OF_THE_MOMENT)
        for one in instruction.operands
    )
