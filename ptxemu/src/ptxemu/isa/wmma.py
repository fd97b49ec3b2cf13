"""Matrix products on fragments that wmma.load and wmma.store move (PTX ISA, "Warp Level Matrix
Instructions: wmma").

A fragment is a matrix spread over the registers of a warp; the ISA leaves open how. Here A and B
(as n rows of k), C and D lie row after row: lane l holds the l-th piece, and where the registers
hold more than the matrix they hold it several times. C and D of 16 x 16 are two 16 x 8 tiles as
mma.sync has them, which kernels rely on that look at single elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.isa.memory_operands import take_space
from ptxemu.isa.registry import Modifiers, unsupported, visible
from ptxemu.machine.decoded import Step
from ptxemu.machine.lane_memory import LaneMemory
from ptxemu.machine.lanes import FULL, WARP_SIZE, Mask
from ptxemu.machine.operands import elements, reader, rows_reader, rows_writer
from ptxemu.machine.state import Warp
from ptxemu.numerics import dot
from ptxemu.syntax.ast import Instruction, Operand

Array = NDArray[Any]
_SHAPES = ("m16n16k16", "m32n8k16", "m8n32k16", "m16n16k8", "m8n8k4", "m8n8k32", "m8n8k128")
_BITS = {**dot.BITS, "f32": 32, "s32": 32}
_HALF_SHAPES = _SHAPES[:3]
_OPERAND_SHAPES = {
    **dict.fromkeys(("f16", "bf16", "s8", "u8"), _HALF_SHAPES),
    "tf32": ("m16n16k8",),
    "f64": ("m8n8k4",),
    **dict.fromkeys(("s4", "u4"), ("m8n8k32",)),
    "b1": ("m8n8k128",),
}
"""Shapes of a product by the type of A and B."""
_RESULT_SHAPES = {
    "f16": _HALF_SHAPES,
    "f32": (*_HALF_SHAPES, "m16n16k8"),
    "s32": (*_HALF_SHAPES, "m8n8k32", "m8n8k128"),
    "f64": ("m8n8k4",),
}
"""Shapes of a product by the type of C and D."""
_HALF_REGISTERS = 8


@dataclass(frozen=True)
class _Fragment:
    """A matrix of `rows` rows (B: its columns) in `registers` registers of `bits` bits a lane.

    Elements of less than a byte count by words: `columns` are words then.
    """

    rows: int
    columns: int
    element: int
    """Bytes of an element."""
    registers: int
    bits: int

    @property
    def per_lane(self) -> int:
        """Elements that a lane holds."""
        return self.registers * self.bits // (8 * self.element)

    def places(self) -> Array:
        """Number of the element, row after row, by lane and position in the lane."""
        slots = np.arange(WARP_SIZE * self.per_lane)
        places = slots % (self.rows * self.columns)
        if (self.rows, self.columns, self.per_lane) == (16, 16, 8):
            lane, i = slots // 8, slots % 8
            row = lane // 4 + 8 * (i // 2 % 2)
            places = 16 * row + 8 * (i // 4) + 2 * (lane % 4) + i % 2
        return places.reshape(WARP_SIZE, self.per_lane)

    def matrix(self, registers: Array, places: Array) -> Array:
        """The elements, (rows, columns) of unsigned integers, in registers (n, 32 lanes)."""
        slots = np.ascontiguousarray(registers.T).view(f"u{self.element}")
        flat = np.empty(self.rows * self.columns, slots.dtype)
        flat[places] = slots.reshape(places.shape)
        return flat.reshape(self.rows, self.columns)

    def lanes(self, matrix: Array, places: Array) -> Array:
        """The reverse of `matrix`: (registers, 32 lanes)."""
        slots = np.ascontiguousarray(matrix.reshape(-1)[places])
        return np.ascontiguousarray(slots.view(f"u{self.bits // 8}").T)


def _fragment(instruction: Instruction, role: str, shape: str, type_: str) -> _Fragment:
    """The fragment of A, B, C or D (`role`: a, b, c, d)."""
    shapes = _OPERAND_SHAPES if role in "ab" else _RESULT_SHAPES
    if shape not in shapes.get(type_, ()):
        unsupported(instruction, "this combination of shape and types")
    m, n, k = (int(part) for part in shape[1:].replace("n", " ").replace("k", " ").split())
    bits = _BITS[type_]
    rows, columns = {"a": (m, k), "b": (n, k)}.get(role, (m, n))
    if bits < 8:
        rows, columns, bits = rows, columns * bits // 32, 32
    width = 64 if type_ == "f64" else 32
    registers = rows * columns * bits // (WARP_SIZE * width)
    if type_ == "f16" and role in "ab":
        registers = _HALF_REGISTERS
    return _Fragment(rows, columns, bits // 8, registers, width)


class _Matrix:
    """A matrix in memory: runs of bytes, whose pieces lanes access.

    Args:
        bits: of an element, of which the stride counts so many.
        by_rows: its rows are the runs; else its columns are.
    """

    def __init__(
        self,
        instruction: Instruction,
        pointer: int,
        space: str,
        fragment: _Fragment,
        bits: int,
        *,
        by_rows: bool,
    ) -> None:
        rows, columns, element = fragment.rows, fragment.columns, fragment.element
        self._shape = (rows, columns) if by_rows else (columns, rows)
        self._by_rows = by_rows
        runs, run_bytes = self._shape[0], self._shape[1] * element
        # A run is aligned to the bytes that a lane holds.
        piece = min(16, fragment.registers * fragment.bits // 8, run_bytes)
        run, inside = np.divmod(np.arange(runs * run_bytes // piece), run_bytes // piece)
        self._runs = run.reshape(-1, min(len(run), WARP_SIZE))
        self._inside = inside.reshape(self._runs.shape) * piece
        self._count = piece // element
        operand = instruction.operands[pointer]
        self._memory = LaneMemory(instruction, operand, space, element, self._count)
        self._stride = _stride(instruction.operands[2:], bits, run_bytes)

    def _addresses(self, warp: Warp) -> Array:
        """Addresses of the pieces, 32 lanes at a time."""
        start = self._memory.addresses(warp, FULL)[0]
        addresses: Array = start + self._runs * self._stride(warp) + self._inside
        return addresses

    def load(self, warp: Warp) -> Array:
        """The elements, (rows, columns) of unsigned integers."""
        parts = [self._memory.load_at(warp, FULL, row).T for row in self._addresses(warp)]
        matrix = np.concatenate(parts).reshape(self._shape)
        return matrix if self._by_rows else matrix.T

    def store(self, warp: Warp, matrix: Array) -> None:
        """Write the elements."""
        runs = np.ascontiguousarray(matrix if self._by_rows else matrix.T)
        addresses = self._addresses(warp)
        for row, values in zip(addresses, runs.reshape(*addresses.shape, -1), strict=True):
            self._memory.store_at(warp, FULL, row, values.T if self._count > 1 else values[:, 0])


@visible("wmma.load")
def load(instruction: Instruction, modifiers: Modifiers) -> Step:
    """A fragment from memory; every lane gives the same address and stride."""
    role = modifiers.one_of("a", "b", "c")
    fragment, memory = _memory_form(instruction, modifiers, role, 1)
    destination = elements(instruction.operands[0])
    if len(destination) != fragment.registers:
        unsupported(instruction, f"expected {fragment.registers} registers")
    write, places = rows_writer(destination), fragment.places()
    return lambda warp, mask: write(warp, fragment.lanes(memory.load(warp), places), mask)


@visible("wmma.store")
def store(instruction: Instruction, modifiers: Modifiers) -> Step:
    """The fragment D to memory; every lane gives the same address and stride."""
    role = modifiers.one_of("d")
    fragment, memory = _memory_form(instruction, modifiers, role, 0)
    sources = elements(instruction.operands[1])
    if len(sources) != fragment.registers:
        unsupported(instruction, f"expected {fragment.registers} registers")
    read, places = rows_reader(sources, f"b{fragment.bits}"), fragment.places()
    return lambda warp, mask: memory.store(warp, fragment.matrix(read(warp), places))


def _memory_form(
    instruction: Instruction, modifiers: Modifiers, role: str, pointer: int
) -> tuple[_Fragment, _Matrix]:
    """Return the fragment and the matrix in memory."""
    modifiers.expect("sync", "aligned")
    layout = modifiers.one_of("row", "col")
    shape = modifiers.one_of(*_SHAPES)
    type_ = modifiers.type()
    space = take_space(modifiers)
    if space not in ("generic", "global", "shared::cta"):
        unsupported(instruction, f"space .{space}")
    fragment = _fragment(instruction, role, shape, type_)
    along_columns = (layout == "col") if role == "b" else (layout == "row")
    if _BITS[type_] < 8 and not along_columns:
        unsupported(instruction, "elements of less than a byte lie along k")
    bits = _BITS[type_]
    return fragment, _Matrix(instruction, pointer, space, fragment, bits, by_rows=along_columns)


def _stride(operands: tuple[Operand, ...], bits: int, natural: int) -> Callable[[Warp], int]:
    """Bytes between two rows or columns; the operand counts elements, as a signed number."""
    if not operands:
        return lambda warp: natural
    read = reader(operands[0], "s32")
    return lambda warp: int(read(warp)[0]) * bits // 8


@visible("wmma.mma")
def multiply(instruction: Instruction, modifiers: Modifiers) -> Step:
    """D = A * B + C; floating-point sums are rounded once (`numerics.dot`)."""
    bits = dot.BIT_PRODUCTS.get(modifiers.one_of(*dot.BIT_PRODUCTS, default=""))
    if bits is not None:
        modifiers.one_of("popc")
    modifiers.expect("sync", "aligned")
    for _ in "ab":
        modifiers.one_of("row", "col")
    shape = modifiers.one_of(*_SHAPES)
    saturates = modifiers.flag("satfinite")
    c_type = modifiers.type()
    if shape in _HALF_SHAPES and len(instruction.modifiers) == _MODIFIERS_WITHOUT_OPERAND_TYPES:
        a_type = b_type = "f16"
    else:
        b_type, a_type = modifiers.type(), modifiers.type()
    d_type = modifiers.type()
    if a_type == "f64":
        modifiers.one_of("rn", "rz", "rm", "rp", default="rn")
    types = (a_type, b_type, c_type, d_type)
    _check_types(instruction, types, bits is not None, saturates=saturates)
    roles = (("d", d_type), ("a", a_type), ("b", b_type), ("c", c_type))
    fragments = [_fragment(instruction, role, shape, type_) for role, type_ in roles]
    operands = [elements(operand) for operand in instruction.operands]
    if [len(operand) for operand in operands] != [f.registers for f in fragments]:
        unsupported(instruction, "the number of registers does not fit the shape")
    write = rows_writer(operands[0])
    sources = [
        (f, rows_reader(parts, f"b{f.bits}"), f.places())
        for f, parts in zip(fragments[1:], operands[1:], strict=True)
    ]
    result, places = fragments[0], fragments[0].places()

    def step(warp: Warp, mask: Mask) -> None:
        a, b, c = (f.matrix(read(warp), at) for f, read, at in sources)
        left, right = (
            dot.numbers(np.ascontiguousarray(raw).view(np.uint8), type_)
            for raw, type_ in ((a, a_type), (b, b_type))
        )
        sums = dot.product(left, right) if bits is None else bits(left, right)
        cells = _total(c, sums, c_type, d_type, saturates=saturates)
        write(warp, result.lanes(cells, places), mask)

    return step


_MODIFIERS_WITHOUT_OPERAND_TYPES = 9
"""Modifiers of wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32, whose A and B are f16."""
_RESULTS = {
    "f16": ("f16", "f32"),
    **dict.fromkeys(("bf16", "tf32"), ("f32",)),
    "f64": ("f64",),
    **dict.fromkeys(("s8", "u8", "s4", "u4", "b1"), ("s32",)),
}
"""Types of C and D by that of A."""


def _check_types(
    instruction: Instruction, types: tuple[str, str, str, str], is_bits: bool, *, saturates: bool
) -> None:
    a, b, c, d = types
    results = _RESULTS.get(a, ())
    agree = a == b or (a[1:] == b[1:] and a[0] in "su" and b[0] in "su")
    if not agree or c not in results or d not in results or is_bits != (a == "b1"):
        unsupported(instruction, "this combination of shape and types")
    if saturates and d != "s32":
        unsupported(instruction, ".satfinite is for integers")


def _total(c: Array, sums: Array, c_type: str, d_type: str, *, saturates: bool) -> Array:
    """D as unsigned integers of its own width."""
    if d_type == "s32":
        return dot.accumulated(c, sums, "s32", saturate=saturates)
    floats = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
    total = c.view(floats[c_type]).astype(np.float64) + sums
    if d_type == "f64":
        cells: Array = total.view(np.uint64)
        return cells
    rounded: Array = dot.accumulated(None, total, d_type).astype(f"u{_BITS[d_type] // 8}")
    return rounded
