"""The format strings of vprintf: C's conversions, with arguments from a buffer of a thread."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

ReadBytes = Callable[[int, int], bytes]
"""Bytes at a generic address of the calling thread."""

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d+))?"
    r"(?P<length>hh|h|ll|l|j|z|t|L)?(?P<kind>[diouxXcsfFeEgGaAp%])"
)
_LONG = ("ll", "l", "j", "z", "t")
_MAX_STRING = 1 << 16


def formatted(format_address: int, arguments: int, read: ReadBytes) -> str:
    """The text that printf would write.

    Args:
        format_address: generic address of the format string.
        arguments: generic address of the arguments, each aligned to its own size, as a C struct.
        read: reads the thread's memory.
    """
    values = _Arguments(arguments, read)

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


class _Arguments:
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


def _convert(match: re.Match[str], arguments: _Arguments, read: ReadBytes) -> str:
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
