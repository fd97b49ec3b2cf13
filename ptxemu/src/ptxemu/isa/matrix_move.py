"""Matrices between shared memory and a warp's registers (PTX ISA, "Warp Level Matrix Instructions":
ldmatrix, stmatrix, movmatrix).

Lane 8i + r gives the address of row r of matrix i; a row is 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.isa.memory_operands import take_space
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_memory import LaneMemory
from ptxemu.machine.lanes import FULL, LANE_IDS, WARP_SIZE, Mask
from ptxemu.machine.operands import elements, reader, writer
from ptxemu.machine.state import Warp
from ptxemu.syntax.ast import Instruction

_ROW_WORDS = 4
Array = NDArray[Any]


def _rows(lanes: int) -> Mask:
    return np.less(LANE_IDS, lanes)


def _to_fragments(rows: Array) -> Array:
    """8x8 matrices of 16-bit elements (n, 8 rows, 4 words) as registers (n, 32)."""
    return np.ascontiguousarray(rows).reshape(-1, WARP_SIZE)


def _same(matrices: Array) -> Array:
    return matrices


def _transposed(matrices: Array) -> Array:
    """Each 8x8 matrix of 16-bit elements (n, 8 rows, 4 words) transposed."""
    halves = np.ascontiguousarray(matrices).view(np.uint16)
    return np.ascontiguousarray(halves.transpose(0, 2, 1)).view(np.uint32)


@visible("ldmatrix.sync")
def load_matrix(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Registers r of lane l: row l / 4, elements 2(l % 4) and the next of matrix r (.b16)."""
    modifiers.one_of("aligned")
    shape = modifiers.one_of("m8n8", "m16n16", "m8n16")
    count = int(modifiers.one_of("x1", "x2", "x4")[1])
    transposes = modifiers.flag("trans")
    space = _take_space(instruction, modifiers)
    writers = [writer(part) for part in elements(instruction.operands[0])]
    convert: Callable[[Array], Array]
    if shape == "m8n8":
        modifiers.one_of("b16")
        convert = _transposed if transposes else _same
        registers, lanes = count, 8 * count
    else:
        convert, registers, lanes = _byte_form(instruction, modifiers, shape, count, transposes)
    if len(writers) != registers:
        unsupported(instruction, f"expected {registers} registers")
    memory = LaneMemory(instruction, instruction.operands[1], space, 4, _ROW_WORDS)
    givers = _rows(lanes)

    def step(warp: Warp, mask: Mask) -> None:
        words = memory.load(warp, FULL if lanes == WARP_SIZE else givers)
        fragments = _to_fragments(convert(words.T.reshape(-1, 8, _ROW_WORDS)))
        for write, values in zip(writers, fragments, strict=True):
            write(warp, values, mask)

    return step


def _take_space(instruction: Instruction, modifiers: Modifiers) -> str:
    space = take_space(modifiers)
    if space not in ("shared::cta", "generic"):
        unsupported(instruction, f"space .{space}")
    return space


def _byte_form(
    instruction: Instruction, modifiers: Modifiers, shape: str, count: int, transposes: bool
) -> tuple[Callable[[Array], Array], int, int]:
    """The .b8 forms of sm_100a: what makes 8x8 matrices of words of the rows; registers; lanes."""
    packing = modifiers.one_of("b6x16_p32", "b4x16_p64", "b8")
    if packing != "b8":
        modifiers.one_of("b8x16")
    if transposes != (shape == "m16n16") or (shape == "m16n16" and count == 4):
        unsupported(instruction, "m16n16 is .x1 or .x2 with .trans, m8n16 without")
    if shape == "m8n16" and packing == "b8":
        unsupported(instruction, "m8n16 is for 6-bit and 4-bit sources")
    unpack = {"b8": _same, "b6x16_p32": _unpack_6, "b4x16_p64": _unpack_4}[packing]
    if shape == "m8n16":
        return (lambda rows: unpack(rows), count, 8 * count)

    def transposed(rows: Array) -> Array:
        data = np.ascontiguousarray(unpack(rows)).view(np.uint8).reshape(-1, 16, 16)
        columns = np.ascontiguousarray(data.transpose(0, 2, 1))
        return columns.view(np.uint32).reshape(-1, 8, _ROW_WORDS)

    return transposed, 2 * count, 16 * count


def _unpack_6(rows: Array) -> Array:
    """Rows of 16 packed 6-bit elements and 4 bytes of padding, as 16 bytes."""
    data = np.ascontiguousarray(rows).view(np.uint8)
    bits = np.unpackbits(data[..., :12], axis=-1, bitorder="little")
    bits = bits.reshape(*data.shape[:-1], 16, 6)
    padded = np.concatenate([bits, np.zeros((*bits.shape[:-1], 2), np.uint8)], axis=-1)
    return np.packbits(padded, axis=-1, bitorder="little")[..., 0].view(np.uint32)


def _unpack_4(rows: Array) -> Array:
    """Rows of 16 packed 4-bit elements and 8 bytes of padding, as 16 bytes."""
    data = np.ascontiguousarray(rows).view(np.uint8)[..., :8]
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], 16).view(np.uint32)


@visible("stmatrix.sync")
def store_matrix(instruction: Instruction, modifiers: Modifiers) -> Step:
    """The reverse of ldmatrix; .m16n8 of bytes stores the transposed 16x8 matrix."""
    modifiers.one_of("aligned")
    shape = modifiers.one_of("m8n8", "m16n8")
    count = int(modifiers.one_of("x1", "x2", "x4")[1])
    transposes = modifiers.flag("trans")
    space = _take_space(instruction, modifiers)
    modifiers.one_of("b16" if shape == "m8n8" else "b8")
    if shape == "m16n8" and not transposes:
        unsupported(instruction, "m16n8 needs .trans")
    readers = [reader(part, "b32") for part in elements(instruction.operands[1])]
    if len(readers) != count:
        unsupported(instruction, f"expected {count} registers")
    memory = LaneMemory(instruction, instruction.operands[0], space, 4, _ROW_WORDS)
    lanes = 8 * count
    givers = _rows(lanes)

    def step(warp: Warp, mask: Mask) -> None:
        matrices = np.stack([read(warp) for read in readers]).reshape(-1, 8, _ROW_WORDS)
        if shape == "m16n8":
            matrices = _transposed_bytes(matrices)
        elif transposes:
            matrices = _transposed(matrices)
        rows = np.ascontiguousarray(matrices.reshape(lanes, _ROW_WORDS).T)
        memory.store(warp, FULL if lanes == WARP_SIZE else givers, rows)

    return step


def _transposed_bytes(matrices: Array) -> Array:
    """Fragments of 16x8 byte matrices as their 8 columns, which are rows of 16 bytes in memory.

    Byte 2h + q of lane l is the element of row l / 4 + 8h, column 2(l % 4) + q.
    """
    data = np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, 8, 4, 2, 2)
    columns = np.ascontiguousarray(data.transpose(0, 2, 4, 3, 1))
    return columns.reshape(-1, 8, 16).view(np.uint32)


@visible("movmatrix.sync")
def move_matrix(instruction: Instruction, modifiers: Modifiers) -> Step:
    """Transpose an 8x8 matrix of 16-bit elements that the warp holds."""
    modifiers.expect("aligned", "m8n8", "trans", "b16")
    destination, a = instruction.operands
    write, read = writer(destination), reader(a, "b32")

    def step(warp: Warp, mask: Mask) -> None:
        matrix = read(warp).reshape(1, 8, _ROW_WORDS)
        write(warp, _transposed(matrix).reshape(WARP_SIZE), mask)

    return step
