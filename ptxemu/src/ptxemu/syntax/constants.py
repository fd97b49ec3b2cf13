"""Numbers and constant expressions: PTX text to an integer or to the bits of a float."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable

from ptxemu.syntax.ast import FloatImmediate, IntImmediate
from ptxemu.syntax.lexer import Cursor, StatementError

WARP_SIZE = 32
_DEEPEST = 40

_INTEGER = re.compile(r"(-?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|(0[0-7]*)|([1-9][0-9]*))U?", re.A)
_HEX_FLOAT = re.compile(r"(-?)0(?:[fF]([0-9a-fA-F]{8})|[dD]([0-9a-fA-F]{16}))", re.A)
_DECIMAL_FLOAT = re.compile(
    r"-?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)", re.A
)


def integer(text: str) -> int | None:
    """The value of an integer literal, None if the text is not one."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    sign, hexadecimal, binary, octal, decimal = match.groups()
    digits, base = next(
        (d, b) for d, b in ((decimal, 10), (hexadecimal, 16), (octal, 8), (binary, 2)) if d
    )
    if len(digits) > 66:
        raise StatementError(f"{text[:20]}... does not fit 64 bits")
    value = int(digits, base)
    if value >> 64:
        raise StatementError(f"{text} does not fit 64 bits")
    return -value if sign else value


def floating(text: str) -> FloatImmediate | None:
    """0f, 0d or a decimal with a point or an exponent (a double); None if the text is not one."""
    match = _HEX_FLOAT.fullmatch(text)
    if match is not None:
        sign, single, double = match.groups()
        width = 32 if single else 64
        bits = int(single or double, 16)
        return FloatImmediate(bits ^ (1 << width - 1) if sign else bits, width)
    if _DECIMAL_FLOAT.fullmatch(text):
        return FloatImmediate(int.from_bytes(struct.pack("<d", float(text)), "little"), 64)
    return None


def number(text: str) -> IntImmediate | FloatImmediate | None:
    """An operand that is a literal number, None if the text is not one."""
    value = integer(text)
    return floating(text) if value is None else IntImmediate(value)


def float_value(immediate: FloatImmediate) -> float:
    """The number that the bits stand for."""
    size = immediate.width // 8
    raw = immediate.bits.to_bytes(size, "little")
    value: float = struct.unpack("<f" if size == 4 else "<d", raw)[0]
    return value


def float_bytes(value: float, size: int) -> bytes:
    """The number rounded to a float of 2, 4 or 8 bytes; too large becomes infinite."""
    form = {2: "<e", 4: "<f", 8: "<d"}[size]
    try:
        return struct.pack(form, value)
    except OverflowError:
        return struct.pack(form, math.copysign(math.inf, value))


def _quotient(a: int, b: int) -> int:
    if b == 0:
        raise StatementError("a constant expression divides by zero")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _shift_count(count: int) -> int:
    if not 0 <= count < 64:
        raise StatementError(f"a constant expression shifts by {count}")
    return count


_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a) or bool(b))},
    {"&&": lambda a, b: int(bool(a) and bool(b))},
    {"|": lambda a, b: a | b},
    {"^": lambda a, b: a ^ b},
    {"&": lambda a, b: a & b},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {
        "<": lambda a, b: int(a < b),
        "<=": lambda a, b: int(a <= b),
        ">": lambda a, b: int(a > b),
        ">=": lambda a, b: int(a >= b),
    },
    {"<<": lambda a, b: a << _shift_count(b), ">>": lambda a, b: a >> _shift_count(b)},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"*": lambda a, b: a * b, "/": _quotient, "%": lambda a, b: a - b * _quotient(a, b)},
)
"""C's binary operators by precedence, loosest first."""


def expression(cursor: Cursor, depth: int = 0) -> int:
    """Read a constant expression with C's operators from the cursor."""
    if depth > _DEEPEST:
        raise StatementError("a constant expression is nested too deeply")
    condition = _binary(cursor, 0, depth)
    if not cursor.accept("?"):
        return condition
    chosen = expression(cursor, depth + 1)
    cursor.expect(":")
    other = expression(cursor, depth + 1)
    return chosen if condition else other


def _binary(cursor: Cursor, level: int, depth: int) -> int:
    if level == len(_LEVELS):
        return _unary(cursor, depth)
    value = _binary(cursor, level + 1, depth)
    while (operation := _LEVELS[level].get(cursor.next)) is not None:
        cursor.take()
        value = operation(value, _binary(cursor, level + 1, depth))
        if not -(1 << 64) < value < 1 << 64:
            raise StatementError("a constant expression does not fit 64 bits")
    return value


def _unary(cursor: Cursor, depth: int) -> int:
    if depth > _DEEPEST:
        raise StatementError("a constant expression is nested too deeply")
    token = cursor.take()
    if token == "-":
        return -_unary(cursor, depth + 1)
    if token == "+":
        return _unary(cursor, depth + 1)
    if token == "~":
        return ~_unary(cursor, depth + 1)
    if token == "!":
        return int(not _unary(cursor, depth + 1))
    if token == "(":
        if cursor.next in (".s64", ".u64"):
            wrap = cursor.take() == ".u64"
            cursor.expect(")")
            value = _unary(cursor, depth + 1) & (1 << 64) - 1
            return value if wrap or not value >> 63 else value - (1 << 64)
        value = expression(cursor, depth + 1)
        cursor.expect(")")
        return value
    if token == "WARP_SZ":
        return WARP_SIZE
    value_or_none = integer(token)
    if value_or_none is None:
        raise StatementError(f"{token or 'the end'!r} is not a constant")
    return value_or_none


def evaluate(text: str) -> int:
    """The value of a constant expression that is the whole text."""
    cursor = Cursor(text)
    value = expression(cursor)
    cursor.finish()
    return value
