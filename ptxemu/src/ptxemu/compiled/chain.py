"""Blocks and weak accesses that stand in a row, as threaded code that is called once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptxemu.compiled.access_records import access_routine, context_of, descriptor, kind_of
from ptxemu.compiled.routines import MOST_DESTINATIONS, MOST_SOURCES
from ptxemu.compiled.threaded_code import Part, Records, ThreadedCode
from ptxemu.machine.blocks import Block
from ptxemu.machine.program import StepNode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ptxemu.machine.lane_group import Group
    from ptxemu.machine.program import Program
    from ptxemu.machine.register_file import RegisterLayout
    from ptxemu.machine.state import Warp

MOST_NODES = 200


class ThreadedKernel(ThreadedCode):
    """The threaded code of one kernel, accesses included."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._nodes, self._registers = program.nodes, program.layout

    def chain(self, first: int) -> Chain | None:
        """The blocks and accesses from `first` on; None where there is no access that is known."""
        assert self._registers is not None
        chain = Chain(self, first)
        for _ in range(MOST_NODES):
            node = self._nodes[chain.end]
            if isinstance(node, Block) and node.loop is None:
                parts = self.parts(node)
                if parts is None:
                    break
                chain.add_block(node, parts)
            elif not isinstance(node, StepNode) or not chain.add_access(node, self._registers):
                break
        return chain if chain.num_accesses else None


class Chain:
    """Instructions [first, end) of a kernel, for lanes that are all together."""

    def __init__(self, code: ThreadedCode, first: int) -> None:
        self.first = self.end = first
        self.num_accesses = 0
        self._code = code
        self._parts: list[tuple[Part, list[int]]] = []
        """Each with the pcs of its accesses and, of records, where they are in it."""
        self._has_stores = False
        self._kept: list[NDArray[np.int64]] = []

    def add_block(self, block: Block, parts: tuple[Part, ...]) -> None:
        """Append a block."""
        for part in parts:
            if isinstance(part, Records):
                self._add_records(part.records, -1)
            else:
                self._parts.append((part, []))
        self.end = block.end

    def add_access(self, node: StepNode, layout: RegisterLayout) -> bool:
        """Append a load or store; return False if it must not be appended."""
        access = node.access
        kind = None if access is None else kind_of(access)
        if access is None or kind is None:
            return False
        words = descriptor(access, layout)
        self._kept.append(words)
        guard = node.guard
        operands = [0] * (MOST_DESTINATIONS + MOST_SOURCES - 1)
        held = [0, 0]
        if guard is not None:
            held = [self._code.register(guard.register.slot), -int(guard.negated)]
        record = [access_routine(kind) + 1, int(words.ctypes.data), *operands, *held]
        self._add_records(np.array([record], np.int64), self.end)
        self.num_accesses += 1
        self._has_stores |= access.is_store
        self.end += 1
        return True

    def _add_records(self, records: NDArray[np.int64], pc: int) -> None:
        """`pc`: of an access, or -1."""
        pcs = [pc] * len(records)
        if self._parts:
            last, before = self._parts[-1]
            if isinstance(last, Records):
                self._parts.pop()
                records, pcs = np.concatenate([last.records, records]), before + pcs
        self._parts.append((Records(records), pcs))

    def run(self, warp: Warp, group: Group) -> bool:
        """Execute it and move the lanes; False where the instruction at their pc is to be executed
        by itself: an access failed."""
        context = context_of(warp.cta).address()
        code, mask = self._code, group.mask
        end = self.end
        for part, pcs in self._parts:
            done = part.run(code, warp, mask, context)
            if done < len(pcs):
                end = pcs[done]
                break
        group.pc = end
        warp.instruction_count += end - self.first
        if self._has_stores:
            warp.cta.machine.progress += 1
        return end == self.end
