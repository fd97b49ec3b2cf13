"""Matrix products of one warp (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions: mma").

Recorded on an H200: f64 is a chain of fma over ascending k, and single bits are counted exactly.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from ptxemu.isa import mma_fragments as fragments
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lanes import Mask
from ptxemu.machine.operands import LaneReader, LaneWriter, elements, rows_reader, rows_writer
from ptxemu.machine.state import Warp
from ptxemu.numerics import dot, exact
from ptxemu.numerics.dtypes import F2, F4, F8, U2, U4, U8, Array
from ptxemu.syntax.ast import Instruction

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
        left = dot.numbers(fragments.rows_of_a(registers.a(warp), rows), a_type)
        right = dot.numbers(fragments.columns_of_b(registers.b(warp)), b_type)
        before = fragments.cells_of(registers.c(warp), rows, d_type)
        if d_type == "f64":
            found = _chained(left, right, before.view(F8), mode).view(U8)
        else:
            sums = dot.product(left, right) if bits is None else bits(left, right)
            found = dot.accumulated(before, sums, d_type, saturate=saturates)
        registers.d(warp, fragments.registers_of(found, d_type), mask)

    return step


def _chained(a: Array, b: Array, c: Array, mode: str) -> Array:
    """f64: fma after fma, k ascending, each rounded in the mode."""
    total = c.ravel()
    for column, row in zip(a.T, b.T, strict=True):
        left, right = np.repeat(column, fragments.COLUMNS), np.tile(row, len(column))
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
        a = fragments.quad_operand(registers.a(warp), k_major=a_layout == "row")
        b = fragments.quad_operand(registers.b(warp), k_major=b_layout == "col")
        before = fragments.quad_cells(registers.c(warp), c_type)
        sums = (a.astype(F8) @ b.astype(F8).transpose(0, 2, 1)).reshape(32, 8)
        if d_type == "f32":
            held = before.astype(F4).view(U4).reshape(32, 8)
            cells = dot.accumulated(held, sums, "f32").view(F4)
        else:
            held = before.view(U2).astype(U4).reshape(32, 8)
            cells = dot.accumulated(held, sums, "f16").astype(U2).view(F2)
        found = fragments.quad_registers(cells.reshape(4, 8, 8), d_type)
        registers.d(warp, found, mask)

    return step
