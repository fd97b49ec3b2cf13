"""Matrix products of one warp (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions: mma").

All m16n8 shapes hold their fragments alike, in 32-bit words of 1, 2 or 4 elements of k. Lane l,
with g = l / 4 and t = l % 4: word r of A is row g + 8(r % 2), word t + 4(r / 2) of that row; word r
of B is column g, word t + 4r; element i of C and D is row g + 8(i / 2), column 2t + i % 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lanes import WARP_SIZE, Mask
from ptxemu.machine.operands import LaneReader, elements, reader, writer
from ptxemu.numerics import dot
from ptxemu.syntax.ast import Instruction

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp

Array = NDArray[Any]
_ROWS, _COLUMNS = 16, 8
_KINDS = {
    ("f16", "f16"): ("f16", "f32"),
    ("bf16", "bf16"): ("f32",),
    ("tf32", "tf32"): ("f32",),
    **{(a, b): ("f16", "f32") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")},
    **{(a, b): ("s32",) for a in ("s8", "u8") for b in ("s8", "u8")},
}
"""Types of C and D by those of A and B."""
_WORDS_OF_K = (4, 8)
"""32-bit words of a row of A: m16n8k4 and k8 of tf32, k8 and k16 of 16 bits, k16 and k32 of 8."""


@visible("mma.sync", section="Warp Level Matrix Multiply-Accumulate Instructions: mma")
def multiply(instruction: Instruction) -> Step:
    """D = A * B + C; how it is summed and rounded: `numerics.dot`."""
    modifiers = Modifiers(instruction, "mma.sync")
    modifiers.one_of("aligned")
    c_type, b_type, a_type, d_type = (modifiers.type() for _ in range(4))
    shape = modifiers.one_of("m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32")
    modifiers.one_of("row")
    modifiers.one_of("col")
    saturates = modifiers.flag("satfinite")
    modifiers.done()
    depth = int(shape.rpartition("k")[2])
    types = _KINDS.get((a_type, b_type), ())
    words = depth * dot.BITS.get(a_type, 0) // 32
    if d_type not in types or c_type != d_type or words not in _WORDS_OF_K:
        unsupported(instruction, "this combination of shape and types")
    if saturates and d_type != "s32":
        unsupported(instruction, ".satfinite is for integers")
    d, a, b, c = (elements(operand) for operand in instruction.operands)
    halves = 2 if d_type == "f16" else 1
    if [len(d), len(a), len(b), len(c)] != [4 // halves, words // 2, words // 4, 4 // halves]:
        unsupported(instruction, "the number of registers does not fit the shape")
    read_a, read_b, read_c = ([reader(part, "b32") for part in parts] for parts in (a, b, c))
    writers = [writer(part) for part in d]

    def step(warp: Warp, mask: Mask) -> None:
        left = dot.numbers(_rows_of_a(warp, read_a), a_type)
        right = dot.numbers(_columns_of_b(warp, read_b), b_type)
        before = _cells(np.stack([read(warp) for read in read_c]), halves)
        sums = dot.product(left, right)
        cells = dot.accumulated(before, sums, d_type, saturate=saturates)
        for write, values in zip(writers, _registers(cells, halves), strict=True):
            write(warp, values, mask)

    return step


def _rows_of_a(warp: Warp, readers: list[LaneReader]) -> Array:
    """Bytes (16 rows, of k)."""
    words = np.stack([read(warp) for read in readers]).reshape(-1, 2, 8, 4)
    rows = np.ascontiguousarray(words.transpose(1, 2, 0, 3)).reshape(_ROWS, -1)
    return rows.view(np.uint8)


def _columns_of_b(warp: Warp, readers: list[LaneReader]) -> Array:
    """Bytes (8 columns, of k)."""
    words = np.stack([read(warp) for read in readers]).reshape(-1, 8, 4)
    columns = np.ascontiguousarray(words.transpose(1, 0, 2)).reshape(_COLUMNS, -1)
    return columns.view(np.uint8)


def _cells(registers: Array, halves: int) -> Array:
    """C as 32-bit cells (16, 8) from the lanes' registers."""
    if halves == 2:
        # (2 halves of rows, 32 lanes) of two elements
        elements_ = registers.view(np.uint16).reshape(2, 8, 4, 2)
        return elements_.reshape(_ROWS, _COLUMNS).astype(np.uint32)
    parts = registers.reshape(2, 2, 8, 4)
    return np.ascontiguousarray(parts.transpose(0, 2, 3, 1)).reshape(_ROWS, _COLUMNS)


def _registers(cells: Array, halves: int) -> Array:
    """The reverse of `_cells`: (registers, 32 lanes)."""
    if halves == 2:
        packed = np.ascontiguousarray(cells.astype(np.uint16)).reshape(2, WARP_SIZE, 2)
        return packed.view(np.uint32).reshape(2, WARP_SIZE)
    parts = cells.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(parts).reshape(4, WARP_SIZE)
