"""Atomic operations (PTX ISA, "Parallel Synchronization and Communication": atom, red).

The lanes of an instruction act in lane order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.events import Space
from ptxemu.isa.memory_operands import (
    LaneReaders,
    LaneWriters,
    Shape,
    Values,
    destination,
    source,
    take_order,
    take_shape,
    take_space,
)
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_memory import Combine, LaneMemory
from ptxemu.machine.lanes import Mask
from ptxemu.machine.state import Warp
from ptxemu.numerics import atomic
from ptxemu.syntax.ast import Instruction, Operand

_NAMES = ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")
_SPACES = ("shared::cta", "shared::cluster", "global", "generic")
_HALVES = ("f16", "f16x2", "bf16", "bf16x2")


@visible("atom")
def atomic_operation(instruction: Instruction, modifiers: Modifiers) -> Step:
    """d = [a], and [a] = the operation's result, as one step."""
    d, a, *rest = instruction.operands
    return _decode(instruction, modifiers, a, rest, d)


@visible("red")
def reduction(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[a] = the operation's result."""
    a, *rest = instruction.operands
    return _decode(instruction, modifiers, a, rest, None)


def _decode(
    instruction: Instruction,
    modifiers: Modifiers,
    address: Operand,
    operands: list[Operand],
    result: Operand | None,
) -> Step:
    modifiers.drop_hints()
    space = take_space(modifiers)
    order = take_order(modifiers, ("relaxed", "gpu"))
    # NOTE: the manual writes vectors as .add.v4.f32 and, in its examples, .v4.f32.add.
    name = modifiers.one_of(*_NAMES)
    noftz = modifiers.flag("noftz")
    type_, shape = take_shape(modifiers, instruction)
    if noftz != (type_ in _HALVES):
        unsupported(instruction, ".noftz is for halves, and they need it")
    if space not in _SPACES or (result is None and name in ("cas", "exch")):
        unsupported(instruction, f"space .{space}, operation .{name}")
    if shape.count > shape.per_operand and space not in ("global", "generic"):
        unsupported(instruction, "vectors are for .global")
    memory = LaneMemory(instruction, address, space, shape.element, shape.count, order=order)
    write = None if result is None else destination(result, type_, shape)
    if name == "cas":
        return _compare_and_swap(instruction, memory, operands, type_, shape, write)
    function = atomic.operation(name, type_)
    in_global = atomic.operation_in_global(name, type_)
    if function is None or in_global is None:
        unsupported(instruction, f"there is no .{name} for .{type_}")
    read = source(operands[0], type_, shape)

    def step(warp: Warp, mask: Mask) -> None:
        values = read(warp, mask)

        def combine(old: Values, lanes: NDArray[np.intp], where: Space) -> Values:
            operand = np.ascontiguousarray(values[..., lanes])
            return (in_global if where is Space.GLOBAL else function)(old, operand)

        _finish(warp, mask, memory, combine, write)

    return step


def _compare_and_swap(
    instruction: Instruction,
    memory: LaneMemory,
    operands: list[Operand],
    type_: str,
    shape: Shape,
    write: LaneWriters | None,
) -> Step:
    if type_ not in ("b16", "b32", "b64", "b128", "u32", "s32", "u64"):
        unsupported(instruction, f"there is no .cas for .{type_}")
    expected: LaneReaders = source(operands[0], type_, shape)
    replacement: LaneReaders = source(operands[1], type_, shape)

    def step(warp: Warp, mask: Mask) -> None:
        compared, new = expected(warp, mask), replacement(warp, mask)

        def combine(old: Values, lanes: NDArray[np.intp], where: Space) -> Values:
            return atomic.compare_and_swap(old, compared[..., lanes], new[..., lanes])

        _finish(warp, mask, memory, combine, write)

    return step


def _finish(
    warp: Warp, mask: Mask, memory: LaneMemory, combine: Combine, write: LaneWriters | None
) -> None:
    found = memory.update(warp, mask, combine)
    if write is not None:
        write(warp, found, mask)
