"""Matrix products of one warp (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions: mma").

Recorded on an H200: f64 is a chain of fma over ascending k, and single bits are counted exactly.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from ptxemu.engines.sparse_metadata import expanded, rows_of_metadata, warn_of_undefined
from ptxemu.isa.forms import immediate_of
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lanes import LANE_IDS, WARP_SIZE, Mask
from ptxemu.machine.operands import (
    LaneReader,
    LaneWriter,
    elements,
    reader,
    rows_reader,
    rows_writer,
)
from ptxemu.machine.state import Warp
from ptxemu.numerics import dot, exact
from ptxemu.numerics.dtypes import F2, F4, F8, U1, U2, U4, U8, Array
from ptxemu.syntax.ast import Instruction

# Layout of the matrices of mma in the lanes of a warp (PTX ISA, "Matrix Fragments for mma").
#
# All shapes m8n8 and m16n8 but one hold their fragments alike, in words of 32 bits (of f64 in words
# of 64). Lane l, with g = l / 4 and t = l % 4: word r of A is row g + 8(r % h), word t + 4(r / h)
# of that row, h being 1 for 8 rows and 2 for 16; word r of B is column g, word t + 4r; element i of
# C and D is row g + 8(i / 2), column 2t + i % 2.
#
# m8n8k4 of f16 is four products, each of two groups of four lanes, with a layout of its own.

COLUMNS = 8


def rows_of_a(words: Array, rows: int) -> Array:
    """Bytes (rows, of k) of A from its registers (count, 32)."""
    parts = words.reshape(-1, rows // 8, 8, 4).transpose(1, 2, 0, 3)
    return np.ascontiguousarray(parts).reshape(rows, -1).view(U1)


def columns_of_b(words: Array) -> Array:
    """Bytes (8 columns, of k) of B from its registers (count, 32)."""
    parts = words.reshape(-1, 8, 4).transpose(1, 0, 2)
    return np.ascontiguousarray(parts).reshape(COLUMNS, -1).view(U1)


def cells_of(registers: Array, rows: int, type_: str) -> Array:
    """C (rows, 8) from its registers: 32-bit cells (f16 in the low half), or of f64 its bits."""
    if type_ == "f16":
        return registers.view(U2).reshape(rows, COLUMNS).astype(U4)
    parts = registers.reshape(rows // 8, 2, 8, 4).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(parts).reshape(rows, COLUMNS)


def registers_of(cells: Array, type_: str) -> Array:
    """The reverse of `cells_of`: (registers, 32)."""
    rows = cells.shape[0]
    if type_ == "f16":
        packed = np.ascontiguousarray(cells.astype(U2)).reshape(rows // 8, WARP_SIZE, 2)
        return packed.view(U4).reshape(rows // 8, WARP_SIZE)
    parts = cells.reshape(rows // 8, 8, 4, 2).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(parts).reshape(rows // 4, WARP_SIZE)


_QUAD = LANE_IDS.astype(np.intp) // 4 % 4
"""Number of the product of m8n8k4, of four, that each lane takes part in."""
_LINE = LANE_IDS.astype(np.intp) % 4
_SECOND = LANE_IDS.astype(np.intp) // 16
"""1 for the lanes that hold the second half of an operand."""
_FOUR, _EIGHT = np.arange(4)[None, :], np.arange(8)[None, :]


def quad_operand(registers: Array, *, k_major: bool) -> Array:
    """A (4 products, 8 rows, 4) or B (4 products, 8 columns, 4) of m8n8k4 from two registers.

    Args:
        k_major: whether a lane holds four elements along k: A .row or B .col.
    """
    values = np.ascontiguousarray(registers.T).view(F2)
    found = np.zeros((4, 8, 4), F2)
    quad, line, second = _QUAD[:, None], _LINE[:, None], _SECOND[:, None]
    if k_major:
        found[quad, line + 4 * second, _FOUR] = values
    else:
        found[quad, _FOUR + 4 * second, line] = values
    return found


def _places_of_c(type_: str) -> tuple[Array, Array]:
    """Row and column of the 8 elements of C that each lane holds."""
    line, second = _LINE[:, None], _SECOND[:, None]
    if type_ == "f16":
        return line + 4 * second, np.broadcast_to(_EIGHT, (WARP_SIZE, 8))
    rows = (line & 1) + (_EIGHT & 2) + 4 * second
    return rows, (_EIGHT & 4) + (line & 2) + (_EIGHT & 1)


def quad_cells(registers: Array, type_: str) -> Array:
    """C of m8n8k4, (4 products, 8, 8), as numbers."""
    values = np.ascontiguousarray(registers.T).view(F2 if type_ == "f16" else F4)
    found = np.zeros((4, 8, 8), values.dtype)
    rows, columns = _places_of_c(type_)
    found[_QUAD[:, None], rows, columns] = values
    return found


def quad_registers(cells: Array, type_: str) -> Array:
    """D's registers (count, 32) from the numbers (4, 8, 8)."""
    rows, columns = _places_of_c(type_)
    values = np.ascontiguousarray(cells[_QUAD[:, None], rows, columns])
    return np.ascontiguousarray(values.view(U4).T)


_FLOAT8 = ("e4m3", "e5m2")
KINDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("f64", "f64"): ("f64",),
    ("f16", "f16"): ("f16", "f32"),
    ("bf16", "bf16"): ("f32",),
    ("tf32", "tf32"): ("f32",),
    ("b1", "b1"): ("s32",),
    **{pair: ("f16", "f32") for pair in product(_FLOAT8, _FLOAT8)},
    **{pair: ("s32",) for pair in product(("s8", "u8"), ("s8", "u8"))},
    **{pair: ("s32",) for pair in product(("s4", "u4"), ("s4", "u4"))},
}
"""Types of C and D by those of A and B."""
_WORDS: dict[int, dict[int, tuple[int, ...]]] = {
    8: {64: (4,), 8: (4,), 4: (4,), 1: (4,)},
    16: {64: (4, 8, 16), 32: (4, 8), 16: (4, 8), 8: (4, 8), 4: (4, 8), 1: (4, 8)},
}
"""Words along k of a row of A that there are, by rows and by the element's bits."""
_SHAPES = tuple(f"m{m}n8k{k}" for m in (8, 16) for k in (4, 8, 16, 32, 64, 128, 256))
_BLACKWELL_ONLY = "that is of sm_120, which ptxemu does not emulate"


class Registers(NamedTuple):
    """Readers of A, B and C, and the writer of D."""

    a: LaneReader
    b: LaneReader
    c: LaneReader
    d: LaneWriter

    @classmethod
    def decode(
        cls, instruction: Instruction, word: str, counts: tuple[int, int, int, int]
    ) -> Registers:
        """Return the registers of an instruction on d, a, b, c, which are words of type `word`.

        Args:
            counts: how many there must be.
        """
        d, a, b, c = (elements(operand) for operand in instruction.operands[:4])
        if (len(d), len(a), len(b), len(c)) != counts:
            unsupported(instruction, "the number of registers does not fit the shape")
        return cls(rows_reader(a, word), rows_reader(b, word), rows_reader(c, word), rows_writer(d))


def take_types(instruction: Instruction, modifiers: Modifiers) -> tuple[str, str, str, str]:
    """The types of D, A, B and C, which end the opcode, and the kind, which is of 8-bit floats."""
    kind = next((m for m in instruction.modifiers if m.startswith("kind::")), "")
    if "block_scale" in instruction.modifiers:
        unsupported(instruction, f"mma with .{kind} and .block_scale: {_BLACKWELL_ONLY}")
    c, b, a, d = (modifiers.type() for _ in range(4))
    if kind and (kind != "kind::f8f6f4" or not {a, b} <= set(_FLOAT8)):
        unsupported(instruction, f"mma with .{kind} and types .{a}.{b}: {_BLACKWELL_ONLY}")
    modifiers.flag(kind)
    return d, a, b, c


@visible("mma.sync")
def multiply(instruction: Instruction, modifiers: Modifiers) -> Step:
    """D = A * B + C; how it is summed and rounded: `numerics.dot`."""
    modifiers.one_of("aligned")
    bits = dot.BIT_PRODUCTS.get(modifiers.one_of(*dot.BIT_PRODUCTS, default=""))
    if bits is not None:
        modifiers.one_of("popc")
    d_type, a_type, b_type, c_type = types = take_types(instruction, modifiers)
    shape = modifiers.one_of(*_SHAPES)
    if shape == "m8n8k4" and a_type == "f16":
        return _quads(instruction, modifiers, types)
    modifiers.expect("row", "col")
    mode = modifiers.one_of("rn", "rz", "rm", "rp", default="rn") if a_type == "f64" else "rn"
    saturates = modifiers.flag("satfinite")
    rows, depth = int(shape[1:].partition("n")[0]), int(shape.rpartition("k")[2])
    width = dot.BITS.get(a_type, 0)
    size = max(width, 32)
    words = depth * width // size
    known = words in _WORDS[rows].get(width, ()) and d_type in KINDS.get((a_type, b_type), ())
    if not known or c_type != d_type or (bits is None) != (a_type != "b1"):
        unsupported(instruction, "this combination of shape and types")
    if saturates and (d_type != "s32" or bits is not None):
        unsupported(instruction, ".satfinite is for integers")
    cells = rows // 4 // (2 if d_type == "f16" else 1)
    counts = (cells, rows * words // 32, words // 4, cells)
    registers = Registers.decode(instruction, f"b{size}", counts)

    def step(warp: Warp, mask: Mask) -> None:
        left = dot.numbers(rows_of_a(registers.a(warp), rows), a_type)
        right = dot.numbers(columns_of_b(registers.b(warp)), b_type)
        before = cells_of(registers.c(warp), rows, d_type)
        if d_type == "f64":
            found = _chained(left, right, before.view(F8), mode).view(U8)
        else:
            sums = dot.product(left, right) if bits is None else bits(left, right)
            found = dot.accumulated(before, sums, d_type, saturate=saturates)
        registers.d(warp, registers_of(found, d_type), mask)

    return step


def _chained(a: Array, b: Array, c: Array, mode: str) -> Array:
    """f64: fma after fma, k ascending, each rounded in the mode."""
    total = c.ravel()
    for column, row in zip(a.T, b.T, strict=True):
        left, right = np.repeat(column, COLUMNS), np.tile(row, len(column))
        total = exact.fma_f64(left, right, total, mode)
    return total.reshape(c.shape)


def _quads(
    instruction: Instruction, modifiers: Modifiers, types: tuple[str, str, str, str]
) -> Step:
    """m8n8k4 of f16: four products, each of 8 lanes; every combination of layouts is there."""
    d_type, _, b_type, c_type = types
    layouts = [m for m in instruction.modifiers if m in ("row", "col")]
    for layout in layouts:
        modifiers.flag(layout)
    known = len(layouts) == 2 and b_type == "f16" and d_type in ("f16", "f32")
    if not known or c_type not in ("f16", "f32") or (d_type, c_type) == ("f16", "f32"):
        unsupported(instruction, "this combination of shape and types")
    counts = {"f16": 4, "f32": 8}
    registers = Registers.decode(instruction, "b32", (counts[d_type], 2, 2, counts[c_type]))
    a_layout, b_layout = layouts

    def step(warp: Warp, mask: Mask) -> None:
        a = quad_operand(registers.a(warp), k_major=a_layout == "row")
        b = quad_operand(registers.b(warp), k_major=b_layout == "col")
        before = quad_cells(registers.c(warp), c_type)
        sums = (a.astype(F8) @ b.astype(F8).transpose(0, 2, 1)).reshape(32, 8)
        if d_type == "f32":
            held = before.astype(F4).view(U4).reshape(32, 8)
            cells = dot.accumulated(held, sums, "f32").view(F4)
        else:
            held = before.view(U2).astype(U4).reshape(32, 8)
            cells = dot.accumulated(held, sums, "f16").astype(U2).view(F2)
        found = quad_registers(cells.reshape(4, 8, 8), d_type)
        registers.d(warp, found, mask)

    return step


# Products of one warp with a sparse A (PTX ISA, "Multiply-and-Accumulate Instruction: mma.sp").
#
# Of every group of four lanes one, two or all four give metadata, as the sparsity selector says;
# how: `engines.sparse_metadata`. mma.sp and mma.sp::ordered_metadata differ in no result.

_ROWS = 16
_GIVERS = {
    **{(bits, words): 1 if words == 8 else 2 for bits, words in product((16, 32), (8, 16))},
    **{(bits, words): 2 if words == 8 else 4 for bits, words in product((8, 4), (8, 16))},
}
"""Lanes of every four that give metadata, by bits of A's elements and words of a row of B."""
_SPARSE_SHAPES = tuple(f"m16n8k{k}" for k in (8, 16, 32, 64, 128))


@visible("mma.sp.sync", "mma.sp::ordered_metadata.sync")
def multiply_sparse(instruction: Instruction, modifiers: Modifiers) -> Step:
    """D = A * B + C, half of A's elements being zeros that are not stored."""
    modifiers.one_of("aligned")
    d_type, a_type, b_type, c_type = take_types(instruction, modifiers)
    shape = modifiers.one_of(*_SPARSE_SHAPES)
    modifiers.expect("row", "col")
    saturates = modifiers.flag("satfinite")
    width = dot.BITS.get(a_type, 0)
    words = int(shape.rpartition("k")[2]) * width // 32
    givers = _GIVERS.get((width, words))
    fits = d_type in KINDS.get((a_type, b_type), ()) and c_type == d_type
    if givers is None or not fits or (a_type.startswith("e") and words != 16):
        unsupported(instruction, "this combination of shape and types")
    if saturates and d_type != "s32":
        unsupported(instruction, ".satfinite is for integers")
    selector = immediate_of(instruction, 5)
    if not 0 <= selector < 4 // givers:
        unsupported(instruction, f"sparsity selector {selector} is not 0 to {4 // givers - 1}")
    cells = 2 if d_type == "f16" else 4
    registers = Registers.decode(instruction, "b32", (cells, words // 4, words // 4, cells))
    read_metadata = reader(instruction.operands[4], "b32")
    chosen = slice(givers * selector, givers * (selector + 1))

    def step(warp: Warp, mask: Mask) -> None:
        metadata = rows_of_metadata(read_metadata(warp), chosen, width)
        warn_of_undefined(warp.cta, warp, instruction, metadata, a_type)
        kept = dot.numbers(rows_of_a(registers.a(warp), _ROWS), a_type)
        left = expanded(kept, metadata, a_type)
        right = dot.numbers(columns_of_b(registers.b(warp)), b_type)
        before = cells_of(registers.c(warp), _ROWS, d_type)
        sums = dot.product(left, right)
        found = dot.accumulated(before, sums, d_type, saturate=saturates)
        registers.d(warp, registers_of(found, d_type), mask)

    return step
