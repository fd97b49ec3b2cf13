"""Calls of functions that the system provides (PTX ISA, "Control Flow Instructions: call").

Branches and exits are the machine's own (`machine.program`); calls of functions of the module are
replaced by their bodies before (`syntax.inlining`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxemu.errors import ExecutionError
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.call_frames import frame_bytes
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_memory import read_bytes
from ptxemu.machine.lanes import Mask
from ptxemu.machine.print_format import ReadBytes, formatted, read_string
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction, Symbol, Vector

_Arguments = list[int]
_Function = Callable[["Warp", int, _Arguments, Instruction], int | None]
"""A call of one lane: takes the arguments as unsigned integers and returns the result."""


@visible("call")
def call(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Call a function of the system, lane by lane."""
    modifiers.flag("uni")
    returns, target, arguments = instruction.operands[:3]
    function = _FUNCTIONS.get(target.name) if isinstance(target, Symbol) else None
    if function is None:
        name = f"{target.name}: " if isinstance(target, Symbol) else ""
        unsupported(
            instruction,
            f"{name}a function that calls itself, or through others (recursion), is not emulated, "
            f"nor are functions outside the module but {', '.join(_FUNCTIONS)}",
        )
    names = _names(instruction, arguments)
    results = _names(instruction, returns)

    def step(warp: Warp, mask: Mask) -> None:
        frames = [frame_bytes(warp, name) for name in names]
        for lane in np.flatnonzero(mask).tolist():
            values = [
                int.from_bytes(frame[lane].tobytes(), "little")
                for frame in frames
                if frame is not None
            ]
            result = function(warp, lane, values, instruction)
            for name in results:
                frame = frame_bytes(warp, name)
                if frame is not None and result is not None:
                    size = frame.shape[1]
                    frame[lane] = np.frombuffer(result.to_bytes(size, "little"), dtype=np.uint8)

    return step


def _names(instruction: Instruction, operand: object) -> list[str]:
    if not isinstance(operand, Vector):
        unsupported(instruction, "expected parameters in parentheses")
    names = [element.name for element in operand.elements if isinstance(element, Symbol)]
    if len(names) != len(operand.elements):
        unsupported(instruction, "expected the names of parameters")
    return names


def _memory_of(warp: Warp, lane: int, instruction: Instruction) -> ReadBytes:
    return lambda address, size: read_bytes(warp, lane, address, size, instruction)


def _print(warp: Warp, lane: int, arguments: _Arguments, instruction: Instruction) -> int:
    """vprintf(format, arguments): the text goes to `Machine.printed`."""
    format_, values = arguments
    text = formatted(format_, values, _memory_of(warp, lane, instruction))
    warp.cta.machine.printed.append(text)
    return len(text)


def _fail(warp: Warp, lane: int, arguments: _Arguments, instruction: Instruction) -> None:
    """__assertfail(message, file, line, function, size): the device-side assert."""
    message, file, line, *_ = arguments
    read = _memory_of(warp, lane, instruction)
    raise ExecutionError(
        f"{instruction.span}: {warp.label} lane {lane}: assertion `{read_string(message, read)}` "
        f"failed at {read_string(file, read)}:{line}"
    )


def _allocate(warp: Warp, lane: int, arguments: _Arguments, instruction: Instruction) -> int:
    """malloc(size): from a heap without bounds; it lives as long as the launch."""
    return warp.cta.machine.allocate(max(arguments[0], 1), "memory of malloc")


def _free(warp: Warp, lane: int, arguments: _Arguments, instruction: Instruction) -> None:
    """free(address): nothing is given again, so nobody can mistake new memory for old."""


_FUNCTIONS: dict[str, _Function] = {
    "vprintf": _print,
    "__assertfail": _fail,
    "malloc": _allocate,
    "free": _free,
}
"""Functions of the system by name."""
