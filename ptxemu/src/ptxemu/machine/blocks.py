"""Straight runs of pure instructions, compiled to one Python function on NumPy lanes each.

The instruction's meaning stays in its one definition (`isa`); the generated source only calls it
with registers held in local variables, so that a run costs one call per instruction and nothing for
decoding, masks or dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from ptxemu.machine.codegen import BlockFunction, compile_block
from ptxemu.machine.decoded import PureOp
from ptxemu.machine.lanes import FULL, Mask
from ptxemu.syntax.ast import Instruction, register_slots

ThreadedFactory: TypeAlias = "Callable[[Block], BlockFunction | None]"


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
        self.make_threaded: ThreadedFactory | None = None
        """Asked at every run for a function that does the same; it puts None here at the end."""
        self._threaded: BlockFunction | None = None

    @cached_property
    def registers(self) -> frozenset[int]:
        """Slots of the registers that the instructions read or write."""
        return frozenset().union(*(reads | writes for _, reads, writes in self.slots))

    @cached_property
    def slots(self) -> list[tuple[Instruction, frozenset[int], frozenset[int]]]:
        """The instructions with the slots of the registers that each reads and writes."""
        found = []
        for instruction, op in self.code:
            guards = [] if instruction.guard is None else [instruction.guard.register]
            reads = frozenset(register_slots((*op.sources, *guards)))
            found.append((instruction, reads, frozenset(register_slots(op.destinations))))
        return found

    def run(self, warp: Any, mask: Mask) -> None:
        """Execute with the lanes of `mask`; the others keep their registers."""
        if self.make_threaded is not None:
            self._threaded = self.make_threaded(self)
        if self._threaded is not None:
            self._threaded(warp, mask)
        elif mask is FULL:
            if self._full is None:
                self._full = compile_block(self.code, self.temporaries, masked=False)
            self._full(warp, mask)
        else:
            if self._masked is None:
                self._masked = compile_block(self.code, self.temporaries, masked=True)
            self._masked(warp, mask)
