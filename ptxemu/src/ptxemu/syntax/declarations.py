"""Declarations: registers, variables, parameter lists and the head of a function."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from ptxemu.syntax.ast import FloatImmediate, Parameter, Prototype, Relocation, Variable
from ptxemu.syntax.constants import evaluate, expression, float_bytes, float_value, floating
from ptxemu.syntax.lexer import Cursor, StatementError
from ptxemu.syntax.scopes import Scope
from ptxemu.syntax.types import FUNDAMENTAL, TYPES

# Initial values of variables: `= {1, 2.5, generic(symbol)+4}` to bytes and relocations.

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


_LINKAGE = frozenset((".extern", ".visible", ".weak", ".common"))
_VARIABLE_SPACES = frozenset((".shared", ".local", ".global", ".const", ".param"))
_POINTEE_SPACES = frozenset((".global", ".shared", ".local", ".const", ".param"))
_VECTOR_LANES = {".v2": 2, ".v4": 4, ".v8": 8}
_LARGEST = 1 << 48
_MOST_DIMENSIONS = 8

_DIRECTIVES = frozenset(
    (
        *("reqntid", "maxntid", "minnctapersm", "maxnctapersm", "maxnreg", "reqnctapercluster"),
        *("explicitcluster", "maxclusterrank", "blocksareclusters", "noreturn", "abi_preserve"),
        *("abi_preserve_control",),
    )
)
"""Directives allowed between a function's parameters and body, besides .pragma and .attribute."""


@dataclass(slots=True)
class _Type:
    """The words between a declaration's state space and its name."""

    name: str = ""
    lanes: int = 1
    align: int = 0
    is_managed: bool = False

    @property
    def size(self) -> int:
        return TYPES[self.name].size * self.lanes


@dataclass(slots=True)
class Head:
    """A function up to its body."""

    name: str
    is_entry: bool
    parameters: tuple[Parameter, ...]
    returns: tuple[Parameter, ...]
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    register_parameters: tuple[Parameter, ...] = ()
    """Those of a `.func` that are declared `.reg`."""


def registers(text: str, scope: Scope) -> None:
    """`.reg .type name<count>, name;`: declare them in the scope."""
    cursor = Cursor(text)
    cursor.expect(".reg")
    kind = _type(cursor)
    while True:
        name = cursor.name()
        if cursor.accept("<"):
            count = cursor.take()
            if not count.isdecimal() or len(count) > 9:
                raise StatementError(f"{count!r} is no number of registers")
            cursor.expect(">")
            scope.declare_range(name, int(count), kind.name, kind.lanes)
        else:
            scope.declare_register(name, kind.name, kind.lanes)
        if not cursor.accept(","):
            break
    cursor.finish()


def variables(text: str, scope: Scope) -> list[Variable]:
    """`.shared .align 16 .b8 name[1024], ...;` and its like: declare them in the scope."""
    cursor = Cursor(text)
    linkage = set()
    while cursor.next in _LINKAGE:
        linkage.add(cursor.take())
    space = cursor.take()
    if space not in _VARIABLE_SPACES:
        raise StatementError(f"{space or 'the end'!r} is no directive that is known here")
    kind = _type(cursor)
    found: list[Variable] = []
    while True:
        name = cursor.name()
        shape = _dimensions(cursor)
        initial = None
        if cursor.accept("="):
            initial = read_initialiser(cursor, kind.name, kind.lanes, shape)
            shape = initial.shape
        size = _storage(kind, shape)
        resolved = scope.declare_symbol(name)
        found.append(_variable(resolved, space[1:], size, kind, initial))
        if ".extern" in linkage:
            found[-1] = Variable(resolved, space[1:], size, found[-1].align, is_extern=True)
        if not cursor.accept(","):
            break
    cursor.finish()
    return found


def _variable(name: str, space: str, size: int, kind: _Type, initial: Initial | None) -> Variable:
    align = kind.align or kind.size
    if initial is None:
        return Variable(name, space, size, align, is_managed=kind.is_managed)
    if size > LARGEST_INITIALISED:
        raise StatementError(f"{size} initialised bytes are too many")
    data = bytes(initial.data.ljust(size, b"\0"))
    relocations = tuple(initial.relocations)
    return Variable(
        name, space, size, align, initial=data, relocations=relocations, is_managed=kind.is_managed
    )


def _storage(kind: _Type, shape: list[int] | None) -> int:
    size = kind.size * (1 if shape is None else prod(shape))
    if size > _LARGEST:
        raise StatementError(f"a variable of {size} bytes is too large")
    return size


def _dimensions(cursor: Cursor) -> list[int] | None:
    """`[4][8]`, an omitted first one is 0; None where there are none."""
    shape: list[int] | None = None
    while cursor.accept("["):
        shape = [] if shape is None else shape
        if cursor.accept("]"):
            if shape:
                raise StatementError("only the first dimension may be left open")
            shape.append(0)
            continue
        extent = expression(cursor)
        if extent < 0:
            raise StatementError(f"{extent} is no extent of an array")
        shape.append(extent)
        if len(shape) > _MOST_DIMENSIONS:
            raise StatementError(f"more than {_MOST_DIMENSIONS} dimensions")
        cursor.expect("]")
    return shape


def _type(cursor: Cursor) -> _Type:
    """The type with its alignment; a pointer's attributes are read over."""
    kind = _Type()
    while cursor.next.startswith("."):
        word = cursor.take()
        if word == ".align":
            kind.align = _alignment(cursor)
        elif word in _VECTOR_LANES:
            kind.lanes = _VECTOR_LANES[word]
        elif word == ".ptr":
            if cursor.next in _POINTEE_SPACES:
                cursor.take()
            if cursor.accept(".align"):
                _alignment(cursor)
        elif word == ".attribute":
            kind.is_managed = ".managed" in _skip_parentheses(cursor)
        elif word[1:] in FUNDAMENTAL and not kind.name:
            kind.name = word[1:]
        else:
            raise StatementError(f"{word!r} is not expected in a declaration")
    if not kind.name:
        raise StatementError(f"a type is missing before {cursor.next or 'the end'!r}")
    return kind


def _alignment(cursor: Cursor) -> int:
    text = cursor.take()
    value = evaluate(text)
    if value <= 0 or value & (value - 1) or value > 1 << 20:
        raise StatementError(f"{text!r} is no alignment")
    return value


def _skip_parentheses(cursor: Cursor) -> list[str]:
    """Read over a list in parentheses; its tokens."""
    cursor.expect("(")
    depth = 1
    tokens = []
    while depth:
        token = cursor.take()
        tokens.append(token)
        if not token:
            raise StatementError("a parenthesis is not closed")
        depth += (token == "(") - (token == ")")
    return tokens


def _parameters(cursor: Cursor) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """A list in parentheses, laid out in a block; then those of its members that are registers."""
    cursor.expect("(")
    found: list[Parameter] = []
    in_registers: list[Parameter] = []
    offset = 0
    while not cursor.accept(")"):
        if found:
            cursor.expect(",")
        space = cursor.take()
        if space not in (".param", ".reg"):
            raise StatementError(f"expected .param, found {space or 'the end'!r}")
        kind = _type(cursor)
        name = cursor.name()
        size = _storage(kind, _dimensions(cursor))
        align = kind.align or kind.size
        offset = (offset + align - 1) // align * align
        found.append(Parameter(name, kind.name, size, align, offset))
        if space == ".reg":
            in_registers.append(found[-1])
        offset += size
    return tuple(found), tuple(in_registers)


def head(text: str) -> Head:
    """`.visible .entry name (parameters) directives` or the same of a `.func`."""
    cursor = Cursor(text)
    while cursor.next in _LINKAGE:
        cursor.take()
    is_entry = cursor.take() == ".entry"
    if cursor.accept(".attribute"):
        _skip_parentheses(cursor)
    returns, return_registers = _parameters(cursor) if cursor.next == "(" else ((), ())
    if is_entry and returns:
        raise StatementError("an .entry returns nothing")
    name = cursor.name()
    parameters, registers_of_it = _parameters(cursor) if cursor.next == "(" else ((), ())
    if is_entry and registers_of_it:
        raise StatementError("parameters of an .entry are .param")
    directives = _directives(cursor)
    return Head(
        name, is_entry, parameters, returns, directives, (*return_registers, *registers_of_it)
    )


def _directives(cursor: Cursor) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    while cursor.next:
        word = cursor.take()
        if word == ".pragma":
            while cursor.next.startswith('"') or cursor.next == ",":
                cursor.take()
            cursor.accept(";")
        elif word == ".attribute":
            _skip_parentheses(cursor)
        elif word[1:] in _DIRECTIVES and word[0] == ".":
            found[word[1:]] = _numbers(cursor)
        else:
            raise StatementError(f"{word!r} is no directive of a function that is known here")
    return found


def _numbers(cursor: Cursor) -> tuple[int, ...]:
    numbers: list[int] = []
    while cursor.next[:1].isdigit():
        numbers.append(evaluate(cursor.take()))
        if not cursor.accept(","):
            break
    return tuple(numbers)


def prototype(text: str) -> Prototype:
    """`.callprototype (returns) _ (parameters)`."""
    cursor = Cursor(text)
    cursor.expect(".callprototype")
    returns = _parameters(cursor)[0] if cursor.next == "(" else ()
    cursor.expect("_")
    parameters = _parameters(cursor)[0] if cursor.next == "(" else ()
    _directives(cursor)
    return Prototype(returns, parameters)


def names(text: str, directive: str) -> list[str]:
    """`.directive a, b, c`: the names."""
    cursor = Cursor(text)
    cursor.expect(directive)
    found = [cursor.name()]
    while cursor.accept(","):
        found.append(cursor.name())
    cursor.finish()
    return found
