"""Operations on multicast memory (PTX ISA, "Data Movement and Conversion Instructions: multimem").

A multimem address stands for one location in the memory of each GPU. Here there is one GPU: a
multicast object is plain memory, a reduction over its replicas is the one value.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ptxemu.events import Space
from ptxemu.isa import memory_operands
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_memory import LaneMemory
from ptxemu.machine.lanes import Mask
from ptxemu.machine.state import Warp
from ptxemu.numerics import atomic
from ptxemu.syntax.ast import Instruction

_NAMES = ("add", "min", "max", "and", "or", "xor")
_HALVES = ("f16", "f16x2", "bf16", "bf16x2")
_FLOAT8 = ("e4m3", "e5m2", "e4m3x4", "e5m2x4")
_PRECISIONS = {"acc::f32": _HALVES, "acc::f16": _FLOAT8}
"""The types that may be added in a wider one."""
_TYPES = {
    "add": ("u32", "s32", "u64", "f32", "f64", *_HALVES, *_FLOAT8),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", *_HALVES, *_FLOAT8)),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
}


def _place(
    instruction: Instruction, modifiers: Modifiers, operand: int, order: tuple[str, str]
) -> tuple[LaneMemory, str, memory_operands.Shape]:
    """The memory, which is global, and the type and shape of the data."""
    space = memory_operands.take_space(modifiers)
    taken = memory_operands.take_order(modifiers, order)
    type_, shape = memory_operands.take_shape(modifiers, instruction)
    if space not in ("global", "generic"):
        unsupported(instruction, f"space .{space}")
    address = instruction.operands[operand]
    memory = LaneMemory(instruction, address, space, shape.element, shape.count, order=taken)
    return memory, type_, shape


@visible("multimem.ld_reduce")
def load_reduce(instruction: Instruction, modifiers: Modifiers) -> Step:
    """d = the values of all replicas, reduced."""
    name = modifiers.one_of(*_NAMES)
    precision = modifiers.one_of(*_PRECISIONS, default="")
    memory, type_, shape = _place(instruction, modifiers, 1, ("weak", ""))
    is_known = type_ in _TYPES[name]
    if precision:
        is_known = name == "add" and type_ in _PRECISIONS[precision]
    if not is_known:
        unsupported(instruction, f"there is no .{name} for .{type_}")
    write = memory_operands.destination(instruction.operands[0], type_, shape)

    def step(warp: Warp, mask: Mask) -> None:
        write(warp, memory.load(warp, mask), mask)

    return step


@visible("multimem.st")
def store(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[a] = b in all replicas."""
    memory, type_, shape = _place(instruction, modifiers, 0, ("weak", ""))
    read = memory_operands.source(instruction.operands[1], type_, shape)

    def step(warp: Warp, mask: Mask) -> None:
        memory.store(warp, mask, read(warp, mask))

    return step


@visible("multimem.red")
def reduce(instruction: Instruction, modifiers: Modifiers) -> Step:
    """[a] = [a] op b in all replicas."""
    name = modifiers.one_of(*_NAMES)
    memory, type_, shape = _place(instruction, modifiers, 0, ("relaxed", "sys"))
    function = atomic.operation_in_global(name, type_)
    if type_ not in _TYPES[name] or function is None:
        unsupported(instruction, f"there is no .{name} for .{type_}")
    read = memory_operands.source(instruction.operands[1], type_, shape)

    def step(warp: Warp, mask: Mask) -> None:
        values = read(warp, mask)

        def combine(
            old: memory_operands.Values, lanes: NDArray[np.intp], where: Space
        ) -> memory_operands.Values:
            return function(old, np.ascontiguousarray(values[..., lanes]))

        memory.update(warp, mask, combine)

    return step
