"""A stretch of a kernel that warps run as machine code."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.compiled.emitter import Layout, UnknownToMachineCodeError
from ptxemu.compiled.memory_code import CACHE_WORDS, Context
from ptxemu.compiled.native import machine_code
from ptxemu.compiled.stretch_code import NOWHERE, StretchCode, can_be_code
from ptxemu.machine.lane_group import Group
from ptxemu.machine.lanes import FULL, WARP_SIZE
from ptxemu.machine.program import BranchNode, Program
from ptxemu.machine.regions import local_region, local_stride, shared_region

if TYPE_CHECKING:
    from ptxemu.machine.grid import Machine
    from ptxemu.machine.warp import Warp

LEAST_SHARE = 0.6
"""Of a stretch's instructions that must be machine code."""
LEAST_RUN = 20
"""Instructions to a node that is none, but for one exit: to enter and leave costs 20 to 100 us."""
BUDGET = 1024
"""Times that lanes may be sorted or go back before other warps have their turn."""
TRIAL, LEAST_WORK = 64, 30
"""Runs after which a stretch must have executed so many instructions a run, or it is left out."""
_ALIGNMENT = 64


def make_stretch(program: Program, first: int, end: int) -> Stretch | None:
    """The instructions [first, end) as machine code; None where too little of it can be."""
    nodes = [pc for pc in range(first, end) if program.nodes[pc] is not None]
    known = [pc for pc in nodes if can_be_code(program, program.nodes[pc])]
    covered = sum(_count(program.nodes[pc]) for pc in known)
    others = len(nodes) - len(known)
    if covered < LEAST_SHARE * (end - first) or covered < LEAST_RUN * (others - 1):
        return None
    if all(isinstance(program.nodes[pc], BranchNode) for pc in known):
        return None
    try:
        return Stretch(program, known)
    except UnknownToMachineCodeError:
        return None


def _count(node: Any) -> int:
    return int(getattr(node, "count", 1))


class Stretch:
    """Nodes of one kernel as machine code."""

    def __init__(self, program: Program, nodes: list[int]) -> None:
        """Raises:
        UnknownToMachineCodeError: something in it is not known here.
        """
        self.entries = frozenset(nodes)
        self._program = program
        self._ties = program.may_wait
        layout = Layout()
        code = StretchCode(program, nodes, layout)
        address, self._engine = machine_code(code.module, "run")
        pointer = ctypes.c_void_p
        self._run = ctypes.CFUNCTYPE(None, *[pointer] * 5, ctypes.c_int64)(address)
        self._buffer = _aligned(layout.size)
        self._context = np.zeros(Context.SIZE, np.uint64)
        self._caches = np.zeros(max(CACHE_WORDS * code.num_accesses, 1), np.uint64)
        self._scratch = _aligned(8 * code.data_words)
        self._pcs = _aligned(4 * WARP_SIZE).view(np.int32)
        self._arguments = [
            int(array.ctypes.data)
            for array in (self._buffer, self._context, self._caches, self._scratch, self._pcs)
        ]
        rows = dict(layout.rows(self._buffer))
        self._rows = [(slot, row) for slot, row in rows.items() if isinstance(slot, int)]
        self._results = [(slot, rows[slot]) for slot in sorted(code.written)]
        self._others = _reader(layout, {k: r for k, r in rows.items() if not isinstance(k, int)})
        self._machine: weakref.ref[Machine] | None = None
        self._runs = self._work = 0

    def run(self, warp: Warp) -> bool:
        """Let the lanes that can run go on until they leave; whether anything was executed."""
        if len(warp.groups) > 1 and self._ties:
            return False
        machine = warp.cta.machine
        if self._machine is None or self._machine() is not machine:
            if machine.memory.allow_unregistered:
                return False
            self._use(machine)
        moving = [g for g in warp.groups if g.blocked is None and g.awaited is None]
        pcs, context = self._pcs, self._context
        pcs[:] = NOWHERE
        for group in moving:
            pcs[group.mask] = group.pc
        self._describe(warp)
        registers = warp.registers
        for slot, row in self._rows:
            row[:] = registers[slot]
        self._others(warp)
        self._run(*self._arguments, BUDGET)
        executed = int(context[Context.INSTRUCTIONS])
        if not executed:
            return False
        for slot, row in self._results:
            registers[slot] = row.copy()
        warp.instruction_count += executed
        machine.progress += int(context[Context.STORES])
        self._regroup(warp, moving)
        self._judge(executed)
        return True

    def _regroup(self, warp: Warp, moving: list[Group]) -> None:
        """The lanes that ran, by where they are now."""
        alive = self._pcs != NOWHERE
        found = sorted(set(self._pcs.tolist()) - {NOWHERE})
        rest = [group for group in warp.groups if group not in moving]
        groups = []
        for pc in found:
            mask = alive if len(found) == 1 else self._pcs == pc
            groups.append(Group(pc, FULL if mask.all() else mask))
        warp.groups = [*rest, *groups]
        warp.group = groups[0]

    def _describe(self, warp: Warp) -> None:
        """Fill in what the context says of the warp and its CTA."""
        context = self._context
        context[Context.TABLE], context[Context.ENTRIES] = warp.cta.machine.memory.table()
        words = shared_region(warp.cta).words
        delta = int(words.data.ctypes.data) - words.base
        context[Context.SHARED_FIRST] = words.base
        context[Context.SHARED_END] = words.end
        context[Context.SHARED_DELTA] = delta & (1 << 64) - 1
        stride = local_stride(warp)
        if stride:
            context[Context.LOCAL] = int(local_region(warp).words.data.ctypes.data)
            context[Context.LOCAL_STRIDE] = stride
        context[Context.INSTRUCTIONS] = context[Context.STORES] = 0

    def _use(self, machine: Machine) -> None:
        """Begin with another launch."""
        self._machine = weakref.ref(machine)
        self._caches[:] = 0
        self._parameters = np.frombuffer(machine.launch.parameters.ljust(1), np.uint8)
        self._context[Context.PARAMETERS] = int(self._parameters.ctypes.data)

    def _judge(self, executed: int) -> None:
        """Leave the stretch out if warps leave it as soon as they have entered it."""
        self._runs += 1
        self._work += executed
        if self._runs == TRIAL and self._work < LEAST_WORK * TRIAL:
            self._program.stretches.leave_out(self)


def _aligned(size: int) -> NDArray[np.uint8]:
    data = np.zeros(size + _ALIGNMENT, np.uint8)
    return data[-data.ctypes.data % _ALIGNMENT :][:size]


def _reader(layout: Layout, rows: dict[Any, Any]) -> Any:
    """A function that copies in what is no register."""
    names = dict(layout.names)
    lines = []
    for number, (key, row) in enumerate(rows.items()):
        names[f"b{number}"] = row
        lines.append(f"b{number}[:] = {layout.inputs[key]}")
    exec("def read(warp):\n    " + "\n    ".join(lines or ["pass"]) + "\n", names)
    return names["read"]
