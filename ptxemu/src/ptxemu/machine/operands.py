"""Operands turned into functions once, at decode: read lanes, read one value, write lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ptxemu.errors import IllegalInstructionError
from ptxemu.machine.lanes import FULL, STORAGE, VALUE, WARP_SIZE, Lanes, Mask, first_lane, merged
from ptxemu.machine.special_registers import special
from ptxemu.machine.state import Warp
from ptxemu.syntax import ast

LaneReader = Callable[["Warp"], Lanes]
LaneItem = Callable[["Warp", int], int]
LaneWriter = Callable[["Warp", Lanes, Mask], None]
"""Values of several operands are rows of lanes, (n, 32)."""


def convert(lanes: Lanes, type_: str) -> Lanes:
    """Register contents as an instruction of `type_` sees them: viewed, truncated or widened."""
    target = VALUE[type_]
    if lanes.dtype == target:
        return lanes
    if lanes.dtype.itemsize == target.itemsize and lanes.dtype != np.bool_:
        return lanes.view(target)
    return lanes.astype(np.dtype(f"u{target.itemsize}")).view(target)


def store_form(values: Lanes, register: ast.Register) -> Lanes:
    """A result as the register keeps it: bits viewed; a narrower signed one is sign-extended."""
    storage = STORAGE[register.type]
    if values.dtype == storage:
        return values
    if values.dtype.itemsize == storage.itemsize and values.dtype != np.bool_:
        return values.view(storage)
    return values.astype(storage)


def immediate_lanes(operand: ast.IntImmediate | ast.FloatImmediate, type_: str) -> Lanes:
    """A constant in every lane, viewed as `type_`."""
    target = VALUE[type_]
    if isinstance(operand, ast.FloatImmediate):
        if target == np.float64 or type_ == "b64":
            bits = np.full(WARP_SIZE, _float_bits(operand, 64), dtype=np.uint64)
        else:
            bits = np.full(WARP_SIZE, _float_bits(operand, 32), dtype=np.uint32)
        if bits.dtype.itemsize == target.itemsize:
            return bits.view(target)
        return bits.view(np.float32).astype(target)
    if target == np.bool_:
        return np.full(WARP_SIZE, operand.value != 0)
    if target.kind == "f":
        unsigned = np.dtype(f"u{target.itemsize}")
        return np.full(WARP_SIZE, operand.value, dtype=unsigned).view(target)
    wrapped = operand.value & ((1 << (8 * target.itemsize)) - 1)
    return np.full(WARP_SIZE, wrapped, dtype=np.dtype(f"u{target.itemsize}")).view(target)


def _float_bits(operand: ast.FloatImmediate, width: int) -> int:
    if operand.width == width:
        return operand.bits
    if width == 64:
        value = np.uint32(operand.bits).view(np.float32)
        return int(np.float64(value).view(np.uint64))
    value64 = np.uint64(operand.bits).view(np.float64)
    return int(np.float32(value64).view(np.uint32))


def reader(operand: ast.Operand, type_: str) -> LaneReader:
    """A function that gives the operand's 32 values, viewed as `type_`."""
    if isinstance(operand, ast.Register):
        slot = operand.slot
        if STORAGE.get(operand.type) == VALUE[type_]:
            return lambda warp: warp.registers[slot]
        return lambda warp: convert(warp.registers[slot], type_)
    if isinstance(operand, ast.NegatedRegister):
        slot = operand.register.slot
        return lambda warp: ~warp.registers[slot]
    if isinstance(operand, ast.IntImmediate | ast.FloatImmediate):
        constant = immediate_lanes(operand, type_)
        constant.flags.writeable = False
        return lambda warp: constant
    if isinstance(operand, ast.SpecialRegister):
        name = operand.name
        return lambda warp: convert(special(warp, name), type_)
    if isinstance(operand, ast.Symbol):
        symbol, addend = operand.name, operand.addend
        return lambda warp: convert(
            np.full(WARP_SIZE, warp.symbol_address(symbol) + addend, dtype=np.uint64), type_
        )
    raise IllegalInstructionError(f"operand {operand} cannot be read as a value")


def uniform(operand: ast.Operand, type_: str) -> Callable[[Warp, Mask], int]:
    """A function that gives the operand's value in the first lane of the mask, as an int."""
    value = in_lane(operand, type_)
    return lambda warp, mask: value(warp, 0 if mask is FULL else first_lane(mask))


def in_lane(operand: ast.Operand, type_: str) -> LaneItem:
    """A function that gives the operand's value in one lane, as an int."""
    read = reader(operand, type_)
    if isinstance(operand, ast.IntImmediate):
        constant = int(immediate_lanes(operand, type_)[0])
        return lambda warp, lane: constant
    target = VALUE[type_]
    if (
        not isinstance(operand, ast.Register)
        or operand.type == "b128"
        or STORAGE[operand.type].itemsize != target.itemsize
        or (STORAGE[operand.type] != target and target.kind != "i")
    ):
        return lambda warp, lane: int(read(warp)[lane])
    slot, sign = operand.slot, 1 << 8 * target.itemsize - 1

    if target.kind != "i":
        return lambda warp, lane: warp.registers.item(slot, lane)
    return lambda warp, lane: (warp.registers.item(slot, lane) ^ sign) - sign


def address_in_lane(operand: ast.Operand) -> LaneItem:
    """A function that gives the address of `[base + offset]` in one lane (see `address_reader`)."""
    if not isinstance(operand, ast.Address):
        raise IllegalInstructionError(f"operand {operand} is not an address")
    base, offset = operand.base, operand.offset
    if isinstance(base, ast.Symbol):
        symbol, more = base.name, base.addend + offset
        return lambda warp, lane: warp.symbol_address(symbol) + more
    if isinstance(base, ast.Register) and STORAGE[base.type].itemsize == 4:
        value32 = in_lane(base, "u32")
        return lambda warp, lane: (value32(warp, lane) + offset) & 0xFFFFFFFF
    value64, sign = in_lane(base, "s64"), 1 << 63
    if offset == 0:
        return value64
    return lambda warp, lane: (value64(warp, lane) + offset + sign) % (2 * sign) - sign


def writer(operand: ast.Operand) -> LaneWriter:
    """A function that writes values into the operand's register, in the lanes of the mask."""
    if isinstance(operand, ast.Sink):
        return lambda warp, values, mask: None
    if not isinstance(operand, ast.Register):
        raise IllegalInstructionError(f"operand {operand} cannot be written")
    register = operand

    def write(warp: Warp, values: Lanes, mask: Mask) -> None:
        new = store_form(values, register)
        if mask is not FULL:
            new = merged(mask, new, warp.registers[register.slot])
        warp.registers[register.slot] = new

    return write


def _words(operands: Sequence[ast.Operand]) -> tuple[int, ...]:
    """The slots of operands that all are registers of 32 bits; of others none."""
    word = np.dtype(np.uint32)
    registers = [one for one in operands if isinstance(one, ast.Register)]
    if len(registers) < len(operands) or any(STORAGE.get(r.type) != word for r in registers):
        return ()
    return tuple(one.slot for one in registers)


def rows_reader(operands: Sequence[ast.Operand], type_: str) -> LaneReader:
    """A function that gives the values of several operands, viewed as `type_`."""
    slots = _words(operands)
    if slots and VALUE[type_] == np.uint32:
        return lambda warp: warp.registers.words(slots)
    readers = [reader(one, type_) for one in operands]
    return lambda warp: np.stack([read(warp) for read in readers])


def rows_writer(operands: Sequence[ast.Operand]) -> LaneWriter:
    """A function that writes values into several registers, in the lanes of the mask."""
    slots, writers = _words(operands), [writer(one) for one in operands]

    def write(warp: Warp, rows: Lanes, mask: Mask) -> None:
        if slots and mask is FULL:
            warp.registers.set_words(slots, rows.view(np.uint32))
            return
        for write_one, values in zip(writers, rows, strict=True):
            write_one(warp, values, mask)

    return write


def elements(operand: ast.Operand) -> tuple[Any, ...]:
    """The elements of a vector operand; a scalar is a vector of one."""
    return operand.elements if isinstance(operand, ast.Vector) else (operand,)


def address_reader(operand: ast.Operand) -> LaneReader:
    """A function that gives the 32 addresses of `[base + offset]` as int64.

    A base register of 32 bits wraps around there.
    """
    if not isinstance(operand, ast.Address):
        raise IllegalInstructionError(f"operand {operand} is not an address")
    base, offset = operand.base, operand.offset
    if isinstance(base, ast.Register) and STORAGE[base.type].itemsize == 4:
        read32 = reader(base, "u32")
        # NOTE: NumPy combines arrays with arrays of no dimensions faster than with scalars.
        add = np.array(offset & 0xFFFFFFFF, dtype=np.uint32)
        if offset == 0:
            return lambda warp: read32(warp).astype(np.int64)
        return lambda warp: (read32(warp) + add).astype(np.int64)
    read64 = reader(base, "s64")
    if offset == 0:
        return read64
    add64 = np.array(offset, dtype=np.int64)
    return lambda warp: read64(warp) + add64
