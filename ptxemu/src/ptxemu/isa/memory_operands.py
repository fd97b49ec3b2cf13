"""Common parts of memory instructions: space, order and type modifiers, and data operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import IllegalInstructionError
from ptxemu.isa.registry import Modifiers, unsupported
from ptxemu.machine.lanes import FULL, STORAGE, WARP_SIZE, Lanes, Mask
from ptxemu.machine.operands import elements, reader
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction, Operand, Register, Sink
from ptxemu.syntax.types import TYPES

Values: TypeAlias = NDArray[Any]

SCOPES = ("cta", "cluster", "gpu", "sys")
_SPACES = {
    "shared": "shared::cta",
    "shared::cta": "shared::cta",
    "shared::cluster": "shared::cluster",
    "global": "global",
    "local": "local",
    "param": "param",
    "param::entry": "param",
    "param::func": "param",
    "const": "const",
}
_ORDERS = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel")


def take_space(modifiers: Modifiers) -> str:
    """The state space of an operand; "generic" where the opcode names none."""
    written = modifiers.one_of(*_SPACES, default="generic")
    return _SPACES.get(written, written)


def take_order(modifiers: Modifiers, default: tuple[str, str]) -> tuple[str, str]:
    """Memory order and scope as `events.Access` has them; `default` where the opcode has none."""
    if modifiers.flag("mmio"):
        return modifiers.one_of("relaxed"), modifiers.one_of("sys")
    order = modifiers.one_of(*_ORDERS, default="")
    if order == "weak":
        return "weak", ""
    if order == "volatile":
        return "volatile", "sys"
    scope = modifiers.one_of(*SCOPES, default="")
    if not order and not scope:
        return default
    return order or default[0], scope or default[1]


@dataclass(frozen=True, slots=True)
class Shape:
    """The words of a scalar or vector access: `count` of `element` bytes a lane."""

    element: int
    count: int
    per_operand: int
    """Words of one data operand: 2 for b128."""


def take_shape(modifiers: Modifiers, instruction: Instruction) -> tuple[str, Shape]:
    """The type, which is the last modifier, and the vector size."""
    type_ = modifiers.type()
    vector = int(modifiers.one_of("v2", "v4", "v8", default="v1")[1:])
    if type_ == "b128":
        return type_, Shape(8, 2 * vector, 2)
    if type_ not in TYPES or TYPES[type_].size not in (1, 2, 4, 8) or type_ == "pred":
        unsupported(instruction, f"type .{type_}")
    return type_, Shape(TYPES[type_].size, vector, 1)


LaneWriters: TypeAlias = Callable[["Warp", Values, Mask], None]
LaneReaders: TypeAlias = Callable[["Warp", Mask], Values]


def destination(operand: Operand, type_: str, shape: Shape) -> LaneWriters:
    """A function that writes loaded words, one an active lane, into the destination registers.

    A signed type is sign-extended into a wider register, others zero-extended.
    """
    parts = elements(operand)
    if len(parts) * shape.per_operand != shape.count:
        raise IllegalInstructionError(f"expected {shape.count} destinations; got {len(parts)}")
    signed = np.dtype(f"i{shape.element}") if type_.startswith("s") else None
    writers = [_element_writer(part, signed, shape.per_operand) for part in parts]
    if shape.count == 1:
        return writers[0]
    step = shape.per_operand

    def write(warp: Warp, values: Values, mask: Mask) -> None:
        for number, writer in enumerate(writers):
            rows = values[number] if step == 1 else _pairs(values[2 * number : 2 * number + 2])
            writer(warp, rows, mask)

    return write


def _pairs(rows: Values) -> Values:
    """Low and high halves (2, n) as b128 registers keep them, (n, 2)."""
    return np.ascontiguousarray(rows.T)


def _element_writer(operand: Operand, signed: np.dtype[Any] | None, words: int) -> LaneWriters:
    if isinstance(operand, Sink):
        return lambda warp, values, mask: None
    if not isinstance(operand, Register):
        raise IllegalInstructionError(f"operand {operand} cannot be written")
    slot, storage = operand.slot, STORAGE[operand.type]
    if (words == 2) != (operand.type == "b128"):
        raise IllegalInstructionError(f"register {operand.name} does not fit the type")

    def write(warp: Warp, values: Values, mask: Mask) -> None:
        if values.dtype != storage:
            values = (values if signed is None else values.view(signed)).astype(storage)
        if mask is not FULL:
            merged = warp.registers[slot].copy()
            merged[mask] = values
            values = merged
        warp.registers[slot] = values

    return write


def source(operand: Operand, type_: str, shape: Shape) -> LaneReaders:
    """A function that reads the words to store: (n,) or (count, n) of the n active lanes."""
    parts = elements(operand)
    if len(parts) * shape.per_operand != shape.count:
        raise IllegalInstructionError(f"expected {shape.count} sources; got {len(parts)}")
    dtype = np.dtype(f"u{shape.element}")
    bits = "b128" if type_ == "b128" else f"b{8 * shape.element}"
    readers = [reader(part, bits) for part in parts]
    if shape.count == 1:
        only = readers[0]

        def read_one(warp: Warp, mask: Mask) -> Values:
            values = only(warp)
            return values if mask is FULL else values[mask]

        return read_one

    def read(warp: Warp, mask: Mask) -> Values:
        values = np.empty((shape.count, WARP_SIZE), dtype=dtype)
        for number, read_part in enumerate(readers):
            _fill(values, number * shape.per_operand, read_part(warp))
        return values if mask is FULL else values[:, mask]

    return read


def _fill(values: Values, row: int, lanes: Lanes) -> None:
    if lanes.ndim == 1:
        values[row] = lanes
    else:
        values[row : row + 2] = lanes.T
