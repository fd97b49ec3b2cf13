"""Loads and stores (PTX ISA, "Data Movement and Conversion Instructions": ld, ldu, st, st.bulk)."""

from __future__ import annotations

import numpy as np

from ptxemu.errors import ExecutionError, fault
from ptxemu.isa import memory_operands
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import AccessStep, PlainAccess, Step
from ptxemu.machine.lane_memory import LaneMemory
from ptxemu.machine.lanes import WARP_SIZE, Mask
from ptxemu.machine.operands import elements, uniform
from ptxemu.machine.regions import frame_bytes, parameter_bytes
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Address, Instruction, IntImmediate, Operand, Symbol


@visible("ld")
def load(instruction: Instruction, modifiers: Modifiers) -> Step | AccessStep:
    """d = [a]; .nc and cache hints change nothing here."""
    modifiers.drop_hints()
    space = memory_operands.take_space(modifiers)
    order = memory_operands.take_order(modifiers, ("weak", ""))
    type_, shape = memory_operands.take_shape(modifiers, instruction)
    write = memory_operands.destination(instruction.operands[0], type_, shape)
    operand = instruction.operands[1]
    if space == "param" and isinstance(operand, Address) and isinstance(operand.base, Symbol):
        load_parameter = _load_parameter(instruction, operand, shape, write)
        data = instruction.operands[0]
        return _with_access(load_parameter, instruction, operand, data, space, order, shape)
    memory = LaneMemory(instruction, operand, space, shape.element, shape.count, order=order)

    def step(warp: Warp, mask: Mask) -> None:
        write(warp, memory.load(warp, mask), mask)

    return _with_access(step, instruction, operand, instruction.operands[0], space, order, shape)


@visible("ldu")
def load_uniform(instruction: Instruction, modifiers: Modifiers) -> Step:
    """d = [a], read-only data at an address that is the same in the warp."""
    space = memory_operands.take_space(modifiers)
    type_, shape = memory_operands.take_shape(modifiers, instruction)
    write = memory_operands.destination(instruction.operands[0], type_, shape)
    memory = LaneMemory(instruction, instruction.operands[1], space, shape.element, shape.count)

    def step(warp: Warp, mask: Mask) -> None:
        write(warp, memory.load(warp, mask), mask)

    return step


@visible("st")
def store(instruction: Instruction, modifiers: Modifiers) -> Step | AccessStep:
    """[a] = b"""
    modifiers.drop_hints()
    space = memory_operands.take_space(modifiers)
    order = memory_operands.take_order(modifiers, ("weak", ""))
    type_, shape = memory_operands.take_shape(modifiers, instruction)
    operand = instruction.operands[0]
    read = memory_operands.source(instruction.operands[1], type_, shape)
    if space == "param":
        if not (isinstance(operand, Address) and isinstance(operand.base, Symbol)):
            unsupported(instruction, "expected the name of a parameter")
        return _store_argument(instruction, operand, shape, read)
    memory = LaneMemory(instruction, operand, space, shape.element, shape.count, order=order)

    def step(warp: Warp, mask: Mask) -> None:
        memory.store(warp, mask, read(warp, mask))

    return _with_access(step, instruction, operand, instruction.operands[1], space, order, shape)


@visible("st.bulk")
def store_bulk(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Zero `size` bytes, a multiple of 8, of shared memory."""
    modifiers.flag("weak")
    space = memory_operands.take_space(modifiers)
    target, size, value = instruction.operands
    if value != IntImmediate(0):
        unsupported(instruction, "expected the initial value 0")
    address = LaneMemory(instruction, target, space, 8)
    length = uniform(size, "u64")

    def step(warp: Warp, mask: Mask) -> None:
        count = length(warp, mask)
        if count % 8:
            raise ExecutionError(f"{instruction.span}: st.bulk: {count} is no multiple of 8 bytes")
        address.fill(warp, mask, count // 8)

    return step


def _with_access(
    step: Step,
    instruction: Instruction,
    address: Operand,
    data: Operand,
    space: str,
    order: tuple[str, str],
    shape: memory_operands.Shape,
) -> Step | AccessStep:
    """The step, with what machine code needs to know where it orders nothing."""
    if order[0] != "weak" or not isinstance(address, Address) or shape.per_operand != 1:
        return step
    name, type_ = instruction.modifiers[0], instruction.modifiers[-1]
    access = PlainAccess(
        name == "st", space, address, shape.element, elements(data), type_.startswith("s")
    )
    return AccessStep(step, access)


def _load_parameter(
    instruction: Instruction,
    operand: Address,
    shape: memory_operands.Shape,
    write: memory_operands.LaneWriters,
) -> Step:
    """ld.param of a call's result, or of a kernel's parameters where it is no move (`Program`)."""
    assert isinstance(operand.base, Symbol)
    name, offset = operand.base.name, operand.base.addend + operand.offset
    size = shape.element * shape.count
    dtype = np.dtype(f"u{shape.element}")

    def step(warp: Warp, mask: Mask) -> None:
        frame = frame_bytes(warp, name)
        if frame is None:
            data = parameter_bytes(warp, name, offset, size, instruction)
            rows = np.broadcast_to(np.frombuffer(data, np.uint8), (WARP_SIZE, size))
        else:
            rows = frame[:, offset : offset + size]
        words = np.ascontiguousarray(rows).view(dtype)
        values = words[:, 0] if shape.count == 1 else np.ascontiguousarray(words.T)
        write(warp, values[..., mask], mask)

    return step


def _store_argument(
    instruction: Instruction,
    operand: Address,
    shape: memory_operands.Shape,
    read: memory_operands.LaneReaders,
) -> Step:
    """st.param: an argument of the call that follows."""
    assert isinstance(operand.base, Symbol)
    name, offset = operand.base.name, operand.base.addend + operand.offset
    size = shape.element * shape.count

    def step(warp: Warp, mask: Mask) -> None:
        frame = frame_bytes(warp, name)
        if frame is None or offset + size > frame.shape[1]:
            fault(instruction, f"{name} is no argument")
        values = np.ascontiguousarray(np.atleast_2d(read(warp, mask)).T)
        frame[mask, offset : offset + size] = values.view(np.uint8).reshape(len(values), size)

    return step
