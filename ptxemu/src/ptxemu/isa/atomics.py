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


# Operations on multicast memory (PTX ISA, "Data Movement and Conversion Instructions: multimem").
#
# A multimem address stands for one location in the memory of each GPU. Here there is one GPU: a
# multicast object is plain memory, a reduction over its replicas is the one value.

_MULTIMEM_NAMES = ("add", "min", "max", "and", "or", "xor")
_FLOAT8 = ("e4m3", "e5m2", "e4m3x4", "e5m2x4")
_PRECISIONS = {"acc::f32": _HALVES, "acc::f16": _FLOAT8}
"""The types that may be added in a wider one."""
_MULTIMEM_TYPES = {
    "add": ("u32", "s32", "u64", "f32", "f64", *_HALVES, *_FLOAT8),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", *_HALVES, *_FLOAT8)),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
}


def _place(
    instruction: Instruction, modifiers: Modifiers, operand: int, order: tuple[str, str]
) -> tuple[LaneMemory, str, Shape]:
    """The memory, which is global, and the type and shape of the data."""
    space = take_space(modifiers)
    taken = take_order(modifiers, order)
    type_, shape = take_shape(modifiers, instruction)
    if space not in ("global", "generic"):
        unsupported(instruction, f"space .{space}")
    address = instruction.operands[operand]
    memory = LaneMemory(instruction, address, space, shape.element, shape.count, order=taken)
    return memory, type_, shape


@visible("multimem.ld_reduce")
def load_reduce(instruction: Instruction, modifiers: Modifiers) -> Step:
    """d = the values of all replicas, reduced."""
    name = modifiers.one_of(*_MULTIMEM_NAMES)
    precision = modifiers.one_of(*_PRECISIONS, default="")
    memory, type_, shape = _place(instruction, modifiers, 1, ("weak", ""))
    is_known = type_ in _MULTIMEM_TYPES[name]
    if precision:
        is_known = name == "add" and type_ in _PRECISIONS[precision]
    if not is_known:
        unsupported(instruction, f"there is no .{name} for .{type_}")
    write = destination(instruction.operands[0], type_, shape)

    def step(warp: Warp, mask: Mask) -> None:
        write(warp, memory.load(warp, mask), mask)

    return step


@visible("multimem.st")
def store(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[a] = b in all replicas."""
    memory, type_, shape = _place(instruction, modifiers, 0, ("weak", ""))
    read = source(instruction.operands[1], type_, shape)

    def step(warp: Warp, mask: Mask) -> None:
        memory.store(warp, mask, read(warp, mask))

    return step


@visible("multimem.red")
def reduce(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[a] = [a] op b in all replicas."""
    name = modifiers.one_of(*_MULTIMEM_NAMES)
    memory, type_, shape = _place(instruction, modifiers, 0, ("relaxed", "sys"))
    function = atomic.operation_in_global(name, type_)
    if type_ not in _MULTIMEM_TYPES[name] or function is None:
        unsupported(instruction, f"there is no .{name} for .{type_}")
    read = source(instruction.operands[1], type_, shape)

    def step(warp: Warp, mask: Mask) -> None:
        values = read(warp, mask)

        def combine(old: Values, lanes: NDArray[np.intp], where: Space) -> Values:
            return function(old, np.ascontiguousarray(values[..., lanes]))

        memory.update(warp, mask, combine)

    return step
