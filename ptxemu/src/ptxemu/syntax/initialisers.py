"""Initial values of variables: `= {1, 2.5, generic(symbol)+4}` to bytes and relocations."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from ptxemu.syntax.ast import FloatImmediate, Relocation
from ptxemu.syntax.constants import expression, float_bytes, float_value, floating
from ptxemu.syntax.lexer import Cursor, StatementError
from ptxemu.syntax.types import TYPES

LARGEST_INITIALISED = 1 << 26
"""Bytes that a variable with an initial value may take."""

_ROUNDED = frozenset(("f16", "f32", "f64"))
"""Types whose initial values may be numbers of another format."""


@dataclass(slots=True)
class Initial:
    """Initial value of a variable; `data` may be shorter than the variable, the rest is zero."""

    data: bytearray
    shape: list[int] | None
    """The declared extents, with an open first one filled in."""
    relocations: list[Relocation] = field(default_factory=list)


@dataclass(slots=True)
class _Element:
    """The type of one value."""

    type: str
    size: int
    is_float: bool


def read_initialiser(
    cursor: Cursor, type_name: str, lanes: int, shape: list[int] | None
) -> Initial:
    """Read what follows the `=` of a declaration of `lanes` x `shape` values of a type."""
    kind = TYPES[type_name]
    element = _Element(type_name, kind.size, kind.kind == "float")
    initial = Initial(bytearray(), shape)
    extents = ([] if shape is None else shape) + ([lanes] if lanes > 1 else [])
    if not extents:
        _value(cursor, element, 0, initial)
        return initial
    count = _level(cursor, element, extents, 0, initial)
    if shape and shape[0] == 0:
        initial.shape = [count, *shape[1:]]
    return initial


def _level(
    cursor: Cursor, element: _Element, extents: list[int], offset: int, initial: Initial
) -> int:
    """One pair of braces; how many of its first extent it fills."""
    cursor.expect("{")
    stride = prod(extents[1:])
    if stride == 0:
        raise StatementError("an array of nothing has no initial values")
    limit = extents[0] * stride
    at = 0
    while not cursor.accept("}"):
        if at:
            cursor.expect(",")
            if cursor.accept("}"):
                break
        if limit and at >= limit:
            raise StatementError(f"more than {limit} initial values")
        here = offset + at * element.size
        if here > LARGEST_INITIALISED:
            raise StatementError("too many initialised bytes")
        if cursor.next == "{":
            if len(extents) == 1 or at % stride:
                raise StatementError("'{' is not expected here")
            _level(cursor, element, extents[1:], here, initial)
            at += stride
        else:
            _value(cursor, element, here, initial)
            at += 1
    return -(-at // stride)


def _value(cursor: Cursor, element: _Element, offset: int, initial: Initial) -> None:
    """One value at a byte offset."""
    data = initial.data
    data.extend(bytes(max(0, offset + element.size - len(data))))
    token = cursor.next
    if token and (token[0].isalpha() or token[0] in "_$%") and token != "WARP_SZ":
        initial.relocations.append(_address(cursor, offset, element.size, 0))
        return
    negative = token == "-"
    literal = floating(token + cursor.after_next if negative else token)
    if literal is not None:
        cursor.take()
        if negative:
            cursor.take()
        data[offset : offset + element.size] = _float(literal, element)
        return
    value = expression(cursor)
    if cursor.next == "(" and value > 0:
        mask_shift = (value & -value).bit_length() - 1
        if value >> mask_shift != (1 << 8 * element.size) - 1 or mask_shift % 8:
            raise StatementError(f"{value:#x} is no mask of {element.size} whole bytes")
        cursor.expect("(")
        initial.relocations.append(_address(cursor, offset, element.size, mask_shift))
        cursor.expect(")")
        return
    if element.is_float:
        if element.type not in _ROUNDED:
            raise StatementError(f"no initial values of type .{element.type}")
        data[offset : offset + element.size] = float_bytes(float(value), element.size)
        return
    width = 8 * element.size
    data[offset : offset + element.size] = (value & (1 << width) - 1).to_bytes(
        element.size, "little"
    )


def _float(literal: FloatImmediate, element: _Element) -> bytes:
    """A float literal in an element: its bits where they fit, else rounded to the type."""
    if literal.width == 8 * element.size and TYPES[element.type].kind != "int":
        return literal.bits.to_bytes(element.size, "little")
    if element.type not in _ROUNDED:
        raise StatementError(f"a float initialises .{element.type}")
    return float_bytes(float_value(literal), element.size)


def _address(cursor: Cursor, offset: int, size: int, shift: int) -> Relocation:
    """`symbol`, `symbol+8` or `generic(symbol)+8`."""
    name = cursor.name()
    is_generic = name == "generic" and cursor.accept("(")
    if is_generic:
        name = cursor.name()
    inner = _addend(cursor)
    if is_generic:
        cursor.expect(")")
        inner += _addend(cursor)
    return Relocation(offset, size, name, inner, is_generic, shift)


def _addend(cursor: Cursor) -> int:
    return expression(cursor) if cursor.next in ("+", "-") else 0
