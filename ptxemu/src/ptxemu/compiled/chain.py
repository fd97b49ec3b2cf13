"""Blocks and weak accesses that stand in a row, as threaded code that is called once."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from ptxemu.compiled import access_records
from ptxemu.compiled.routines import MOST_DESTINATIONS, MOST_SOURCES
from ptxemu.compiled.threaded_code import Part, Records, ThreadedCode
from ptxemu.events import Loads, Space
from ptxemu.machine.blocks import Block
from ptxemu.machine.lane_group import Group
from ptxemu.machine.program import Program, StepNode
from ptxemu.machine.regions import shared_region
from ptxemu.machine.register_file import RegisterLayout
from ptxemu.machine.state import Cta, Warp
from ptxemu.syntax.ast import Instruction

MOST_NODES = 200


class ThreadedKernel(ThreadedCode):
    """The threaded code of one kernel, accesses included."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._nodes, self._registers = program.nodes, program.layout
        self._labels = frozenset(program.function.labels.values())
        self._chains: list[Chain] = []
        self._table: object = None

    def context(self, cta: Cta) -> int:
        """The address of a CTA's context; accesses forget where others of another memory were."""
        table = cta.machine.memory.table()
        if table is not self._table:
            self._table = table
            for chain in self._chains:
                chain.forget_places()
        return access_records.context_of(cta).address()

    def chain(self, first: int, *, is_heard: bool) -> Chain | None:
        """The blocks and accesses from `first` on; None where there is no access that is known.

        Args:
            is_heard: an observer is told of its accesses, which are quiet loads.
        """
        chain = HeardChain(self, first) if is_heard else Chain(self, first)
        for _ in range(MOST_NODES):
            node = self._nodes[chain.end]
            if is_heard and chain.end in self._labels and chain.end > first:
                break  # a load belongs to one chain
            if isinstance(node, Block):
                parts = self.parts(node)
                if parts is None:
                    break
                chain.add_block(node, parts)
            elif not isinstance(node, StepNode) or not chain.add_access(node, self._registers):
                break
        if not chain.num_accesses:
            return None
        chain.finish()
        self._chains.append(chain)
        return chain


class Chain:
    """Instructions [first, end) of a kernel, for lanes that are all together."""

    def __init__(self, code: ThreadedKernel, first: int) -> None:
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
        kind = (
            None if access is None or not self._may_hold(node) else access_records.kind_of(access)
        )
        if access is None or kind is None:
            return False
        words = access_records.descriptor(access, layout)
        self._kept.append(words)
        guard = node.guard
        operands = [0] * (MOST_DESTINATIONS + MOST_SOURCES - 1)
        held = [0, 0]
        if guard is not None:
            held = [self._code.register(guard.register.slot), -int(guard.negated)]
        record = [access_records.access_routine(kind) + 1, int(words.ctypes.data), *operands, *held]
        self._add_records(np.array([record], np.int64), self.end)
        self.num_accesses += 1
        self._has_stores |= access.is_store
        self.end += 1
        return True

    def forget_places(self) -> None:
        """Forget the allocations in which accesses were."""
        for words in self._kept:
            words[access_records.PLACE] = 0

    def _may_hold(self, node: StepNode) -> bool:
        """Whether an access of a known kind belongs to a chain of this sort."""
        return True

    def finish(self) -> None:
        """It is as long as it will be."""

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
        code, mask = self._code, group.mask
        context = code.context(warp.cta)
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


class HeardChain(Chain):
    """Blocks and quiet loads, of which an observer is told when all are done."""

    def __init__(self, code: ThreadedKernel, first: int) -> None:
        super().__init__(code, first)
        self._found: list[tuple[Instruction, int, Space]] = []
        self._pcs: list[int] = []
        self._in_shared: NDArray[np.intp] = np.zeros(0, np.intp)
        """Numbers of the loads from shared memory."""

    def _may_hold(self, node: StepNode) -> bool:
        return node.is_quiet

    def add_access(self, node: StepNode, layout: RegisterLayout) -> bool:
        """Append a load; return False if it must not be appended."""
        access, pc = node.access, self.end
        if access is None or not super().add_access(node, layout):
            return False
        space = Space.GLOBAL if access.space == "global" else Space.SHARED
        size = access.element * len(access.registers)
        self._found.append((node.instruction, size, space))
        self._pcs.append(pc)
        return True

    def finish(self) -> None:
        """Give each load a row for its lanes' addresses."""
        self._loads = Loads(self.first, self.end, self._found)
        for words, row in zip(self._kept, self._loads.starts, strict=True):
            words[access_records.LOG] = row.ctypes.data
        self._in_shared = np.flatnonzero([space is Space.SHARED for _, _, space in self._found])

    def run(self, warp: Warp, group: Group) -> bool:
        """Execute it as any chain, and tell the observer."""
        is_done = super().run(warp, group)
        cta, loads = warp.cta, self._loads
        count = self.num_accesses if is_done else bisect_left(self._pcs, group.pc)
        assert cta.machine.observer is not None
        if cta.rank:  # observers know shared memory by offsets
            loads.starts[self._in_shared] -= shared_region(cta).origin
        cta.machine.observer.loaded(warp, cta.index, loads, count)
        return is_done
