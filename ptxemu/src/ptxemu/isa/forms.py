"""Common parts of decoders of pure instructions: checked operands, opcodes that types split.

`add.s32` and `add.f32` are two instructions of two sections of the manual with one opcode: each
section's file defines its own with `overload`, and the types at the opcode's end choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ptxemu.isa.registry import Modifiers, PureDecoder, pure, unsupported
from ptxemu.machine.decoded import PureOp
from ptxemu.machine.lanes import VALUE
from ptxemu.numerics.canonical import bits_of_f16, bits_of_f32
from ptxemu.numerics.dtypes import F2, F4, F8, U8, Array
from ptxemu.syntax import ast
from ptxemu.syntax.types import TYPES, is_type

Function = Callable[..., Any]

_BITS: dict[np.dtype[Any], Function] = {
    F2: bits_of_f16,
    F4: bits_of_f32,
    F8: lambda values: values.view(U8),
}
"""Functions that give the bits of float results."""

_OVERLOADS: dict[str, dict[str, PureDecoder]] = {}


def overload(opcode: str, types: Sequence[str]) -> Callable[[PureDecoder], PureDecoder]:
    """Register a decoder of `opcode` for instructions that end in one of `types`.

    A type is written as in the opcode: "f32", or "f32.f16" for two.
    """

    def register(decode: PureDecoder) -> PureDecoder:
        if opcode not in _OVERLOADS:
            _OVERLOADS[opcode] = {}
            pure(opcode)(_dispatcher(opcode))
        for type_ in types:
            if type_ in _OVERLOADS[opcode]:
                raise ValueError(f"{opcode}.{type_} is defined twice")
            _OVERLOADS[opcode][type_] = decode
        return decode

    return register


def family(
    decode: Callable[..., PureOp], opcodes: Mapping[str, tuple[Any, ...]], *types: str
) -> None:
    """Register one decoder for several opcodes; it takes these arguments too.

    With `types` each is an `overload`.
    """

    def of(arguments: tuple[Any, ...]) -> PureDecoder:
        return lambda instruction, modifiers: decode(instruction, modifiers, *arguments)

    for opcode, arguments in opcodes.items():
        register = overload(opcode, types) if types else pure(opcode)
        register(of(arguments))


def _dispatcher(opcode: str) -> PureDecoder:
    table = _OVERLOADS[opcode]

    def decode(instruction: ast.Instruction, modifiers: Modifiers) -> PureOp:
        trailing = types_of(instruction)
        decoder = table.get(trailing) or table.get(trailing.rpartition(".")[2])
        if decoder is None:
            unsupported(instruction, f"there is no {opcode} of type .{trailing or '(none)'}")
        return decoder(instruction, modifiers)

    return decode


def types_of(instruction: ast.Instruction) -> str:
    """The types at the end of the opcode: "s32", "f32.f16"."""
    parts = instruction.modifiers
    start = len(parts)
    while start > 1 and is_type(parts[start - 1]):
        start -= 1
    return ".".join(parts[start:])


def elementwise(instruction: ast.Instruction, function: Function, type_: str, arity: int) -> PureOp:
    """An instruction `d, a, b...` whose operands all have one type."""
    return build(instruction, function, type_, (type_,) * arity)


def build(
    instruction: ast.Instruction, function: Function, result_type: str, source_types: Sequence[str]
) -> PureOp:
    """An instruction with one destination, whose sources (vectors taken apart) have these types."""
    destination, *sources = instruction.operands
    return assemble(
        instruction, function, (destination,), (result_type,), flat(sources), source_types
    )


def build_relaxed(
    instruction: ast.Instruction, function: Function, result_type: str, source_types: Sequence[str]
) -> PureOp:
    """The same for cvt, whose registers may be wider: sources are cut, results extended.

    A float result is extended with zeros. Where bf16 takes part the widths must be equal.
    """
    if "bf16" in (result_type, *source_types):
        return build(instruction, function, result_type, source_types)
    destination, *sources = instruction.operands
    if isinstance(destination, ast.Register) and VALUE[result_type].kind == "f":
        value = VALUE[result_type]
        if TYPES[destination.type].bits > 8 * value.itemsize:
            number, bits = function, _BITS[value]
            function = lambda *lanes: bits(number(*lanes))
            result_type = f"b{8 * value.itemsize}"
    return assemble(
        instruction,
        function,
        (destination,),
        (result_type,),
        flat(sources),
        source_types,
        relaxed=True,
    )


def assemble(
    instruction: ast.Instruction,
    function: Function,
    destinations: Sequence[ast.Operand],
    result_types: Sequence[str],
    sources: Sequence[ast.Operand],
    source_types: Sequence[str],
    *,
    relaxed: bool = False,
) -> PureOp:
    """A PureOp whose operands are checked against their types; refuses what PTX does not allow."""
    if len(destinations) != len(result_types):
        unsupported(instruction, f"expected {len(result_types)} destinations")
    if len(sources) != len(source_types):
        unsupported(instruction, f"expected {len(source_types)} sources; got {len(sources)}")
    return PureOp(
        function,
        tuple(result_types),
        tuple(source_types),
        tuple(
            _destination(instruction, operand, type_, relaxed)
            for operand, type_ in zip(destinations, result_types, strict=True)
        ),
        tuple(
            _source(instruction, operand, type_, relaxed)
            for operand, type_ in zip(sources, source_types, strict=True)
        ),
    )


def flat(operands: Sequence[ast.Operand]) -> tuple[ast.Operand, ...]:
    """Operands with vectors replaced by their elements."""
    found: list[ast.Operand] = []
    for operand in operands:
        found.extend(operand.elements if isinstance(operand, ast.Vector) else (operand,))
    return tuple(found)


def _destination(
    instruction: ast.Instruction, operand: ast.Operand, type_: str, relaxed: bool
) -> ast.Scalar:
    if isinstance(operand, ast.Sink):
        return operand
    if not isinstance(operand, ast.Register):
        unsupported(instruction, f"{operand} cannot be a destination")
    _check_width(instruction, operand, type_, relaxed and VALUE[type_].kind != "f")
    return operand


def _source(
    instruction: ast.Instruction, operand: ast.Operand, type_: str, relaxed: bool
) -> ast.Scalar:
    if isinstance(operand, ast.NegatedRegister):
        if type_ != "pred":
            unsupported(instruction, f"!{operand.register.name} where .{type_} is expected")
        return operand
    if isinstance(operand, ast.Register):
        _check_width(instruction, operand, type_, relaxed)
        return operand
    if isinstance(operand, ast.Sink | ast.Pair | ast.Address | ast.Vector):
        unsupported(instruction, f"{operand} cannot be a source")
    if type_ == "pred" and isinstance(operand, ast.SpecialRegister):
        if operand.name != "%is_explicit_cluster":
            unsupported(instruction, f"{operand.name} where .pred is expected")
        return operand
    if isinstance(operand, ast.SpecialRegister | ast.Symbol) and VALUE[type_].kind not in "iu":
        unsupported(instruction, f"{operand.name} where .{type_} is expected")
    if type_ == "b128":
        unsupported(instruction, "an immediate of 128 bits")
    if isinstance(operand, ast.IntImmediate) and VALUE[type_].kind == "f":
        unsupported(instruction, f"an integer where .{type_} is expected")
    if isinstance(operand, ast.FloatImmediate) and VALUE[type_].itemsize < 4:
        unsupported(instruction, f"a float immediate where .{type_} is expected")
    return operand


def _check_width(
    instruction: ast.Instruction, register: ast.Register, type_: str, relaxed: bool
) -> None:
    """A register must be as wide as the type; a wider one passes where types are relaxed."""
    declared, expected = TYPES[register.type], TYPES[type_]
    fits = declared.bits == expected.bits or (relaxed and declared.bits > expected.bits)
    if not fits or (declared.kind == "pred") != (expected.kind == "pred"):
        unsupported(instruction, f"{register.name} is .{register.type}: .{type_} is expected")


def immediate(operand: ast.Operand) -> int | None:
    """The value of an integer immediate, None for anything else."""
    return operand.value if isinstance(operand, ast.IntImmediate) else None


def immediate_of(instruction: ast.Instruction, index: int) -> int:
    """The value of an operand that must be an integer constant."""
    if index >= len(instruction.operands):
        unsupported(instruction, f"operand {index} is missing")
    value = immediate(instruction.operands[index])
    if value is None:
        unsupported(instruction, f"operand {index} must be a constant")
    return value


def width_of(type_: str) -> int:
    """Bits of a type such as "s32"."""
    return VALUE[type_].itemsize * 8


def select(condition: Array, chosen: Array, other: Array) -> Array:
    """`chosen` where the condition holds, else `other`; of one type."""
    result = other.copy()
    np.putmask(result, condition, chosen)
    return result
