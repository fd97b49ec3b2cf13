"""Calls of functions that the system provides (PTX ISA, "Control Flow Instructions: call").

Branches and exits are the machine's own (`machine.program`); calls of functions of the module are
replaced by their bodies before (`syntax.inlining`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np

from ptxemu.errors import ExecutionError
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_memory import read_bytes
from ptxemu.machine.lanes import Mask
from ptxemu.machine.regions import frame_bytes
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction, Symbol, Vector

ReadBytes = Callable[[int, int], bytes]
"""Bytes at a generic address of the calling thread."""

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d+))?"
    r"(?P<length>hh|h|ll|l|j|z|t|L)?(?P<kind>[diouxXcsfFeEgGaAp%])"
)
_LONG = ("ll", "l", "j", "z", "t")
_MAX_STRING = 1 << 16


def formatted(format_address: int, arguments: int, read: ReadBytes) -> str:
    """The text that printf would write: C's conversions, with arguments from a thread's memory.

    Args:
        format_address: generic address of the format string.
        arguments: generic address of the arguments, each aligned to its own size, as a C struct.
        read: reads the thread's memory.
    """
    values = _PrintArguments(arguments, read)

    def replace(match: re.Match[str]) -> str:
        return _convert(match, values, read)

    return _CONVERSION.sub(replace, read_string(format_address, read))


def read_string(address: int, read: ReadBytes) -> str:
    """The zero-terminated string at a generic address."""
    data = bytearray()
    while len(data) < _MAX_STRING:
        byte = read(address + len(data), 1)
        if byte == b"\0":
            break
        data += byte
    return data.decode("utf-8", errors="replace")


class _PrintArguments:
    """The arguments, taken in order."""

    def __init__(self, address: int, read: ReadBytes) -> None:
        self._base, self._offset, self._read = address, 0, read

    def take(self, code: str) -> int | float:
        """The next argument, of a `struct` format."""
        size = struct.calcsize(code)
        self._offset = -(-self._offset // size) * size
        data = self._read(self._base + self._offset, size)
        self._offset += size
        value: int | float = struct.unpack(f"<{code}", data)[0]
        return value


def _convert(match: re.Match[str], arguments: _PrintArguments, read: ReadBytes) -> str:
    kind, flags, length = match["kind"], match["flags"], match["length"]
    if kind == "%":
        return "%"
    width = arguments.take("i") if match["width"] == "*" else match["width"] or ""
    precision = match["precision"]
    if precision == "*":
        precision = str(arguments.take("i"))
    spec = f"%{flags}{width}" + ("" if precision is None else f".{precision}")
    if kind in "fFeEgG":
        return (spec + kind) % arguments.take("d")
    if kind in "aA":
        return float(arguments.take("d")).hex()
    if kind == "s":
        return (spec + "s") % read_string(int(arguments.take("Q")), read)
    if kind == "p":
        return (spec + "s") % f"0x{int(arguments.take('Q')):x}"
    signed = kind in "di"
    value = int(arguments.take(("q" if signed else "Q") if length in _LONG else "i"))
    bits = 64 if length in _LONG else {"h": 16, "hh": 8}.get(length or "", 32)
    value &= (1 << bits) - 1
    if signed and value >> (bits - 1):
        value -= 1 << bits
    if kind == "c":
        return (spec + "c") % chr(value & 0xFF)
    return (spec + ("d" if kind in "diu" else kind)) % value


_Function = Callable[["Warp", int, list[int], Instruction], int | None]
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


def _print(warp: Warp, lane: int, arguments: list[int], instruction: Instruction) -> int:
    """vprintf(format, arguments): the text goes to `Machine.printed`."""
    format_, values = arguments
    text = formatted(format_, values, _memory_of(warp, lane, instruction))
    warp.cta.machine.printed.append(text)
    return len(text)


def _fail(warp: Warp, lane: int, arguments: list[int], instruction: Instruction) -> None:
    """__assertfail(message, file, line, function, size): the device-side assert."""
    message, file, line, *_ = arguments
    read = _memory_of(warp, lane, instruction)
    raise ExecutionError(
        f"{instruction.span}: {warp.label} lane {lane}: assertion `{read_string(message, read)}` "
        f"failed at {read_string(file, read)}:{line}"
    )


def _allocate(warp: Warp, lane: int, arguments: list[int], instruction: Instruction) -> int:
    """malloc(size): from a heap without bounds; it lives as long as the launch."""
    return warp.cta.machine.allocate(max(arguments[0], 1), "memory of malloc")


def _free(warp: Warp, lane: int, arguments: list[int], instruction: Instruction) -> None:
    """free(address): nothing is given again, so nobody can mistake new memory for old."""


_FUNCTIONS: dict[str, _Function] = {
    "vprintf": _print,
    "__assertfail": _fail,
    "malloc": _allocate,
    "free": _free,
}
"""Functions of the system by name."""
