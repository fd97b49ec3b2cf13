"""Straight runs of pure instructions, compiled to one Python function on NumPy lanes each.

The instruction's meaning stays in its one definition (`isa`); the generated source only calls it
with registers held in local variables, so that a run costs one call per instruction and nothing for
decoding, masks or dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeAlias

from ptxemu.machine.codegen import BlockFunction, compile_block
from ptxemu.machine.decoded import PureOp
from ptxemu.machine.lanes import FULL, Mask
from ptxemu.syntax.ast import Guard, Instruction, NegatedRegister, Register, Scalar

FastFunction: TypeAlias = Callable[[Any, Mask, int], int]
"""A block on a warp's lanes of a mask; a loop at most so many rounds: gives the number done."""
ThreadedFactory: TypeAlias = "Callable[[Block], FastFunction | None]"
HOT_LOOP_RUNS = 32
"""Rounds of a loop after which it becomes machine code: it may go on for long."""
HOT_RUNS, HOT_INSTRUCTIONS = 200, 8000
"""Runs, plus executed instructions, that pay for machine code of a block that is no loop."""


class Accelerator(Protocol):
    """Makes machine code of blocks."""

    def __call__(self, block: Block, *, masked: bool) -> FastFunction | None:
        """The block as machine code, or None."""
        ...


class Block:
    """Pure instructions [first, end) of a kernel, with no label inside."""

    def __init__(
        self,
        code: Sequence[tuple[Instruction, PureOp]],
        accelerator: Accelerator | None = None,
        hot_runs: int | None = None,
    ) -> None:
        """`accelerator` makes machine code of it at its `hot_runs`-th run; None: when it pays."""
        self.code = tuple(code)
        self.first = code[0][0].pc
        self.end = code[-1][0].pc + 1
        self.count = len(self.code)
        """Number of instructions."""
        self.temporaries: frozenset[int] = frozenset()
        """Slots of registers whose value nobody needs after the block."""
        self._accelerator = accelerator
        self._hot_runs = hot_runs or HOT_RUNS + HOT_INSTRUCTIONS // self.count
        self._is_hot = False
        self._runs = 0
        self._full: BlockFunction | None = None
        self._masked: BlockFunction | None = None
        self._fast: dict[bool, FastFunction | None] = {}
        """Machine code for all lanes (False) and for the lanes of a mask (True)."""
        self._loop: Guard | None = None
        self.make_threaded: ThreadedFactory | None = None
        """Asked at every run for a function that does the same; it puts None here at the end."""
        self._threaded: FastFunction | None = None

    @property
    def loop(self) -> Guard | None:
        """Guard of a branch after the block back to its start."""
        return self._loop

    @loop.setter
    def loop(self, guard: Guard | None) -> None:
        self._loop = guard
        self._hot_runs = min(self._hot_runs, HOT_LOOP_RUNS)

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
            found.append((instruction, _slots((*op.sources, *guards)), _slots(op.destinations)))
        return found

    def run(self, warp: Any, mask: Mask, rounds: int) -> int:
        """Execute with the lanes of `mask`; the others keep their registers.

        A loop may go on while its branch is taken by all lanes, for at most `rounds` rounds.

        Returns:
            how often the block was executed.
        """
        self._runs += 1
        if self.make_threaded is not None:
            self._threaded = self.make_threaded(self)
        if self._runs == self._hot_runs:
            self._is_hot = self._loop is not None or self._threaded is None
        if self._is_hot and (self._threaded is None or (self._loop is not None and rounds > 1)):
            fast = self._machine_code(masked=mask is not FULL)
            if fast is not None:
                return fast(warp, mask, rounds)
        if self._threaded is not None:
            return self._threaded(warp, mask, rounds)
        if mask is FULL:
            if self._full is None:
                self._full = compile_block(self.code, self.temporaries, masked=False)
            self._full(warp, mask)
        else:
            if self._masked is None:
                self._masked = compile_block(self.code, self.temporaries, masked=True)
            self._masked(warp, mask)
        return 1

    def _machine_code(self, *, masked: bool) -> FastFunction | None:
        """Code of its own, which copies registers in and out: it pays in a loop of many rounds."""
        if masked not in self._fast:
            make = self._accelerator
            self._fast[masked] = None if make is None else make(self, masked=masked)
        return self._fast[masked]


def _slots(operands: Iterable[Scalar]) -> frozenset[int]:
    """The slots of the registers among operands."""
    registers = (o.register if isinstance(o, NegatedRegister) else o for o in operands)
    return frozenset(register.slot for register in registers if isinstance(register, Register))
