"""PTX ISA "Data Movement and Conversion Instructions" that stay in registers: mov and prmt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ptxemu.isa.forms import Function, assemble, build, elementwise, immediate, select, width_of
from ptxemu.isa.registry import Modifiers, pure, unsupported
from ptxemu.machine.decoded import PureOp, identity
from ptxemu.numerics.dtypes import U1, U4, U8, Array, constant, join, split
from ptxemu.syntax.ast import Instruction, IntImmediate, Vector

_SCALARS = ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")


@pure("mov")
def mov(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """d = a: a register, constant or address; or a vector packed or taken apart ("...: mov")."""
    type_ = modifiers.one_of("pred", "b128", *_SCALARS)
    if len(instruction.operands) != 2:
        unsupported(instruction, "expected two operands")
    destination, source = instruction.operands
    if isinstance(source, Vector):
        return _pack(instruction, type_, len(source.elements))
    if isinstance(destination, Vector):
        return _unpack(instruction, type_, destination)
    if type_[0] == "f" and isinstance(source, IntImmediate):
        unsupported(instruction, f"an integer where .{type_} is expected")
    if type_ not in ("pred", "b128"):
        type_ = f"b{width_of(type_)}"  # bits move: no view as a number is needed
    return elementwise(instruction, identity, type_, 1)


def _pack(instruction: Instruction, type_: str, count: int) -> PureOp:
    """mov.b64 d, {a, b}: the first element is the lowest."""
    part = _part_type(instruction, type_, count)
    if type_ == "b128":
        function: Function = lambda *parts: np.stack(parts, axis=1).view(U8)
    elif count == 2:
        dtype = np.dtype(f"u{width_of(type_) // 8}")
        function = lambda low, high: join(low, high, dtype)
    else:
        dtype = np.dtype(f"u{width_of(type_) // 8}")
        function = lambda *parts: np.stack(parts, axis=1).view(dtype)[:, 0]
    return build(instruction, function, type_, (part,) * count)


def _unpack(instruction: Instruction, type_: str, destination: Vector) -> PureOp:
    """mov.b64 {d, e}, a: the first element is the lowest."""
    count = len(destination.elements)
    part = _part_type(instruction, type_, count)
    dtype = np.dtype(f"u{width_of(part) // 8}")
    if type_ != "b128" and count == 2:
        function: Function = lambda a: (a.astype(dtype), split(a, dtype)[1::2].copy())
    else:
        function = lambda a: _parts(a, dtype, count)
    return assemble(
        instruction,
        function,
        destination.elements,
        (part,) * count,
        instruction.operands[1:],
        (type_,),
    )


def _parts(values: Array, dtype: np.dtype[np.uint8], count: int) -> Sequence[Array]:
    # INVARIANT: registers are contiguous; a strided view of the parts would not be.
    parts = split(values, dtype).ravel()
    return [parts[index::count].copy() for index in range(count)]


def _part_type(instruction: Instruction, type_: str, count: int) -> str:
    bits = 128 if type_ == "b128" else width_of(type_)
    if type_[0] != "b" or type_[1:].startswith("f") or (bits, count) not in _SPLITS:
        unsupported(instruction, f"a vector of {count} elements of a .{type_}")
    return f"b{bits // count}"


_SPLITS = {(16, 2), (32, 2), (32, 4), (64, 2), (64, 4), (128, 2), (128, 4)}

_MODES: dict[str, tuple[int, ...]] = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}
"""The generic selector that each mode stands for, by the two low bits of c."""

_NIBBLES = np.array([0, 4, 8, 12], U4)
_SELECTED = constant(7, U4)
_SIGN = constant(8, U4)
_BYTE_SIGN = constant(0x80, U1)


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """prmt's generic form: each nibble picks a byte of [b:a], or with bit 3 spreads its sign."""
    source = split(join(a, b, U8), U1).reshape(-1, 8)
    nibbles = selector[:, None] >> _NIBBLES
    picked = np.take_along_axis(source, (nibbles & _SELECTED).astype(np.intp), axis=1)
    if np.count_nonzero(nibbles & _SIGN):
        spread = np.where(picked & _BYTE_SIGN, 0xFF, 0).astype(U1)
        picked = select(nibbles & _SIGN != 0, spread, picked)
    return np.ascontiguousarray(picked).view(U4)[:, 0]


def _permute_by(selector: int) -> Function:
    """The generic form for a constant selector."""
    places = [selector >> shift & 7 for shift in (0, 4, 8, 12)]
    signs = [bool(selector >> shift & 8) for shift in (0, 4, 8, 12)]

    def function(a: Array, b: Array) -> Array:
        source = split(join(a, b, U8), U1)
        result = np.empty(4 * a.size, U1)
        for index, (place, spreads) in enumerate(zip(places, signs, strict=True)):
            picked = source[place::8]
            result[index::4] = np.where(picked & _BYTE_SIGN, 0xFF, 0) if spreads else picked
        return result.view(U4)

    return function


@pure("prmt")
def prmt(instruction: Instruction, modifiers: Modifiers) -> PureOp:
    """Four bytes picked from two registers ("...: prmt")."""
    modifiers.one_of("b32")
    mode = modifiers.one_of(*_MODES, default="")
    if mode:
        selectors = np.array(_MODES[mode], U4)
        function = lambda a, b, c: _permute(a, b, selectors[c & constant(3, U4)])
        return elementwise(instruction, function, "b32", 3)
    selector = immediate(instruction.operands[3]) if len(instruction.operands) == 4 else None
    if selector is None:
        return elementwise(instruction, _permute, "b32", 3)
    destination, a, b, _ = instruction.operands
    return assemble(
        instruction, _permute_by(selector), (destination,), ("b32",), (a, b), ("b32", "b32")
    )
