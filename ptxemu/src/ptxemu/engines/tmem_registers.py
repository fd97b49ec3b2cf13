"""tcgen05.ld and tcgen05.st: TMEM to registers of a warp and back, asynchronously."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.engines.tmem_access import access_tmem
from ptxemu.errors import ExecutionError
from ptxemu.events import AccessKind, Proxy
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.in_flight import claim, release
from ptxemu.machine.lanes import Lanes
from ptxemu.machine.state import AsyncOperation, Warp
from ptxemu.memory.tmem import COLUMNS, PARTITION, Fragment, split_address
from ptxemu.syntax.ast import Instruction

WARP_SIZE = 32
POISON: NDArray[np.uint32] = np.full(WARP_SIZE, 0x7FFFDEAD, dtype=np.uint32)
"""A NaN: what the registers of a tcgen05.ld hold until its step is taken."""
POISON.flags.writeable = False
_SIXTEEN = np.uint32(16)
_LOW_HALF = np.uint32(0xFFFF)


pending_loads: EngineState[Warp, list[AsyncOperation]] = EngineState(lambda warp: [])
"""The tcgen05.ld operations that a warp has not waited for."""
pending_stores: EngineState[Warp, list[AsyncOperation]] = EngineState(lambda warp: [])
"""The tcgen05.st operations that a warp has not waited for."""


def issue_load(
    warp: Warp, instruction: Instruction, fragment: Fragment, slots: tuple[int, ...], address: int
) -> None:
    """Start a tcgen05.ld into registers `slots`.

    Raises:
        ExecutionError: lanes that the warp may not access.
    """
    lane, column = _checked_address(warp, instruction, fragment, address)
    operation = AsyncOperation("tcgen05.ld", warp, instruction)
    pending_loads(warp).append(operation)
    for slot in slots:
        warp.registers[slot] = POISON

    def execute() -> None:
        _report(operation, fragment, AccessKind.READ, lane, column)
        words = _load(warp, fragment, lane, column)
        warp.registers.set_words(slots, words)
        if warp.cta.machine.observer is None:  # else the first touch or wait is reported
            release(warp, operation, slots)

    operation.steps.append(execute)
    claim(warp, operation, slots)
    warp.cta.machine.issue(operation)


def issue_store(
    warp: Warp, instruction: Instruction, fragment: Fragment, values: list[Lanes], address: int
) -> None:
    """Start a tcgen05.st of register values, taken now.

    Raises:
        ExecutionError: lanes that the warp may not access.
    """
    lane, column = _checked_address(warp, instruction, fragment, address)
    operation = AsyncOperation("tcgen05.st", warp, instruction)
    pending_stores(warp).append(operation)

    def execute() -> None:
        _report(operation, fragment, AccessKind.WRITE, lane, column)
        index = _index(fragment, lane, column)
        cells = warp.cta.tmem.reshape(-1)
        words = np.concatenate(values).reshape(index.shape)
        if fragment.is_packed:
            cells[index] = words & _LOW_HALF
            cells[index + 1] = words >> _SIXTEEN
        else:
            cells[index] = words

    operation.steps.append(execute)
    warp.cta.machine.issue(operation)


def _index(fragment: Fragment, lane: int, column: int) -> NDArray[np.int64]:
    return fragment.lanes * COLUMNS + (fragment.columns + (lane * COLUMNS + column))


def _load(warp: Warp, fragment: Fragment, lane: int, column: int) -> NDArray[np.uint32]:
    """The registers' values (registers, 32)."""
    cells = warp.cta.tmem.reshape(-1)
    index = _index(fragment, lane, column)
    words = cells.take(index)
    if fragment.is_packed:
        words = (words & _LOW_HALF) | cells.take(index + 1) << _SIXTEEN
    return words


def _report(
    operation: AsyncOperation, fragment: Fragment, kind: AccessKind, lane: int, column: int
) -> None:
    for part in fragment.rectangles:
        first = lane + part.lane
        access_tmem(
            operation.cta,
            operation,
            operation.instruction,
            kind,
            np.arange(first, first + part.lanes, dtype=np.int64),
            column + part.column,
            part.columns,
            proxy=Proxy.GENERIC,
        )


def _checked_address(
    warp: Warp, instruction: Instruction, fragment: Fragment, address: int
) -> tuple[int, int]:
    """PTX ISA, "Access restrictions": warp w of a warpgroup reaches lanes 32w to 32w + 31.

    Other lanes are undefined behaviour. Hardware goes to the same lane of the warp's own 32, and
    programs that leave the warp's part of the address out rely on that; so does this.
    """
    lane, column = split_address(address)
    own = PARTITION * (warp.index % 4)
    height = fragment.rectangles[0].lanes
    where = f"{instruction.opcode}: {warp.label} may access TMEM lanes {own} to "
    where += f"{own + PARTITION - 1}; the address has lane {lane}"
    section = '(PTX ISA, "tcgen05.ld", "Access restrictions")'
    if lane % PARTITION not in (0, PARTITION - height):
        raise ExecutionError(f"{instruction.span}: {where} and the shape {height} lanes {section}")
    if lane - lane % PARTITION != own:
        level = "error" if lane >= PARTITION else "warning"
        warp.cta.machine.complain(level, "tmem-lanes", f"{where} {section}", warp, instruction)
    return own + lane % PARTITION, column
