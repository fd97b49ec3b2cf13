"""Straight runs of pure instructions, compiled to one Python function on NumPy lanes each.

The instruction's meaning stays in its one definition (`isa`); the generated source only calls it
with registers held in local variables, so that a run costs one call per instruction and nothing for
decoding, masks or dictionaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ptxemu.machine.codegen import BlockFunction, compile_block
from ptxemu.machine.decoded import PureOp
from ptxemu.machine.lanes import Mask
from ptxemu.syntax.ast import Instruction, NegatedRegister, Register


class Block:
    """Pure instructions [first, end) of a kernel, with no label inside."""

    def __init__(self, code: Sequence[tuple[Instruction, PureOp]]) -> None:
        self.code = tuple(code)
        self.first = code[0][0].pc
        self.end = code[-1][0].pc + 1
        self.count = len(self.code)
        """Number of instructions."""
        self.temporaries: frozenset[int] = frozenset()
        """Slots of registers whose value nobody needs after the block."""
        self._full: BlockFunction | None = None
        self._masked: BlockFunction | None = None

    @cached_property
    def registers(self) -> frozenset[int]:
        """Slots of the registers that the instructions read or write."""
        slots: set[int] = set()
        for instruction, op in self.code:
            if instruction.guard is not None:
                slots.add(instruction.guard.register.slot)
            for operand in (*op.sources, *op.destinations):
                if isinstance(operand, Register):
                    slots.add(operand.slot)
                elif isinstance(operand, NegatedRegister):
                    slots.add(operand.register.slot)
        return frozenset(slots)

    def run_full(self, warp: Any, mask: Mask) -> None:
        """Execute with all lanes active."""
        if self._full is None:
            self._full = compile_block(self.code, self.temporaries, masked=False)
        self._full(warp, mask)

    def run_masked(self, warp: Any, mask: Mask) -> None:
        """Execute with the lanes of `mask`; the others keep their registers."""
        if self._masked is None:
            self._masked = compile_block(self.code, self.temporaries, masked=True)
        self._masked(warp, mask)
