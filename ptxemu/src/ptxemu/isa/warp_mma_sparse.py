"""Products of one warp with a sparse A (PTX ISA, "Multiply-and-Accumulate Instruction: mma.sp").

Of every group of four lanes one, two or all four give metadata, as the sparsity selector says; how:
`engines.sparse_metadata`. mma.sp and mma.sp::ordered_metadata differ in no result.
"""

from __future__ import annotations

from itertools import product

from ptxemu.engines.sparse_metadata import rows_of_metadata, warn_of_undefined
from ptxemu.isa import mma_fragments as fragments
from ptxemu.isa.forms import immediate_of
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.isa.warp_mma import KINDS, Registers, take_types
from ptxemu.machine.decoded import Step
from ptxemu.machine.lanes import Mask
from ptxemu.machine.operands import reader
from ptxemu.machine.state import Warp
from ptxemu.numerics import dot, sparsity
from ptxemu.syntax.ast import Instruction

_ROWS = 16
_GIVERS = {
    **{(bits, words): 1 if words == 8 else 2 for bits, words in product((16, 32), (8, 16))},
    **{(bits, words): 2 if words == 8 else 4 for bits, words in product((8, 4), (8, 16))},
}
"""Lanes of every four that give metadata, by bits of A's elements and words of a row of B."""
_SHAPES = tuple(f"m16n8k{k}" for k in (8, 16, 32, 64, 128))


@visible("mma.sp.sync", "mma.sp::ordered_metadata.sync")
def multiply_sparse(instruction: Instruction, modifiers: Modifiers) -> Step:
    """D = A * B + C, half of A's elements being zeros that are not stored."""
    modifiers.one_of("aligned")
    d_type, a_type, b_type, c_type = take_types(instruction, modifiers)
    shape = modifiers.one_of(*_SHAPES)
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
        kept = dot.numbers(fragments.rows_of_a(registers.a(warp), _ROWS), a_type)
        left = sparsity.expanded(kept, metadata, a_type)
        right = dot.numbers(fragments.columns_of_b(registers.b(warp)), b_type)
        before = fragments.cells_of(registers.c(warp), _ROWS, d_type)
        sums = dot.product(left, right)
        found = dot.accumulated(before, sums, d_type, saturate=saturates)
        registers.d(warp, fragments.registers_of(found, d_type), mask)

    return step
