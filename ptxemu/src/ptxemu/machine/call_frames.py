"""Bytes of parameters: the kernel's, and those that a function declares to pass to a call."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import fault
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.lanes import WARP_SIZE
from ptxemu.machine.state import Warp
from ptxemu.memory.address import PARAM_WINDOW
from ptxemu.syntax.ast import Instruction


def frame_bytes(warp: Warp, name: str) -> NDArray[np.uint8] | None:
    """The bytes (32, size) of a .param variable of the function body; None for another name."""
    return _frames(warp).get(name)


def _empty_frames(warp: Warp) -> dict[str, NDArray[np.uint8]]:
    return {
        variable.name: np.zeros((WARP_SIZE, variable.size), dtype=np.uint8)
        for variable in warp.program.function.variables
        if variable.space == "param"
    }


_frames = EngineState(_empty_frames)


def parameter_bytes(
    warp: Warp, name: str, offset: int, size: int, instruction: Instruction
) -> bytes:
    """Bytes of a kernel parameter.

    Raises:
        ExecutionError: they are not all in the parameter block.
    """
    machine = warp.cta.machine
    start = machine.layout.symbol_address(name) - PARAM_WINDOW + offset
    block = machine.launch.parameters
    if not 0 <= start <= len(block) - size:
        fault(
            instruction,
            f"{name}+{offset} ({size} bytes) is outside the {len(block)} bytes of parameters",
        )
    return block[start : start + size]
