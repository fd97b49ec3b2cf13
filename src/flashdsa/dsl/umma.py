"""Matrix products by tcgen05.mma as data: tiles in shared memory, columns in TMEM, descriptors.

Nothing here imports CuTe DSL; `umma_issue.py` issues these products. Operands are bf16 or e4m3,
accumulators fp32. A tile lies in shared memory as TMA writes it: boxes as wide as the swizzle span,
one after the other, each with all rows of the tile. The descriptors are derived from the tile, so a
form is right only if they find again what the tile holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdsa.errors import FlashDsaError
from flashdsa.hw import SM100, TMEM_LANES

SHAPES = 'PTX ISA, "tcgen05.mma", "Matrix Shape"'
TRANSPOSES = 'PTX ISA, "tcgen05.mma", "Transpose and Negate operations"'
DESCRIPTORS = 'PTX ISA, "Shared memory descriptor"'
TMEM = 'PTX ISA, "Tensor Memory"'
SHARED = 'PTX ISA, "tcgen05.mma", "Canonical layouts"'

STEP_BYTES = 32
"""Bytes of a row of A, or a column of B, that one instruction takes."""
TMEM_CELL_BYTES = 4
STEP_COLUMNS = STEP_BYTES // TMEM_CELL_BYTES
"""TMEM columns of one K step of A."""
WS_WIDTHS = (64, 128, 256)

_SWIZZLE_CODES = {0: 0, 32: 6, 64: 4, 128: 2}
_DATA_PATHS = {
    (256, 2, False): "A",
    (128, 2, False): "B",
    (128, 1, False): "D",
    (128, 1, True): "D",
    (64, 1, True): "E",
    (64, 1, False): "F",
    (32, 1, True): "G",
}
_COLUMN_PARTS = {"B": 2, "E": 2, "G": 4}


class OperandFormError(FlashDsaError, ValueError):
    """A form that the instruction does not take: names the limit and the section of the ISA."""


@dataclass(frozen=True)
class Element:
    """A type of A and B.

    Attributes:
        kind: of the instruction. code: in the instruction descriptor.
    """

    name: str
    bytes: int
    kind: str
    code: int

    @property
    def step_k(self) -> int:
        """Elements along K that one instruction takes."""
        return STEP_BYTES // self.bytes


BF16 = Element("bf16", 2, "f16", 1)
E4M3 = Element("e4m3", 1, "f8f6f4", 0)


@dataclass(frozen=True)
class SharedTile:
    """A matrix in shared memory.

    Attributes:
        at: byte offset in the kernel's shared memory, a multiple of 1024.
        swizzle: 32, 64 or 128 bytes.
    """

    name: str
    at: int
    rows: int
    columns: int
    swizzle: int
    element: Element = BF16

    def __post_init__(self) -> None:
        if self.swizzle not in (32, 64, 128):
            raise OperandFormError(
                f"{self.name}: swizzle must be 32, 64 or 128 bytes; got {self.swizzle} ({SHARED})"
            )
        if self.at % 1024:
            raise OperandFormError(
                f"{self.name}: expected an offset that is a multiple of 1024; got {self.at} "
                f"({SHARED})"
            )
        if self.columns % self.width:
            raise OperandFormError(
                f"{self.name}: {self.columns} columns are no multiple of the {self.width} that a "
                f"{self.swizzle}-byte swizzle span holds ({SHARED})"
            )

    @property
    def width(self) -> int:
        return self.swizzle // self.element.bytes

    @property
    def box_bytes(self) -> int:
        """Bytes from one box to the next."""
        return self.rows * self.swizzle

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * self.element.bytes

    def offset(self, row: int, column: int) -> int:
        box, inside = divmod(column, self.width)
        return self.at + box * self.box_bytes + row * self.swizzle + inside * self.element.bytes

    def address(self, row: int, column: int) -> int:
        """Byte offset of an element: bits 4 to 6 changed by bits 7 to 9."""
        offset = self.offset(row, column)
        return offset ^ (offset >> 3 & (self.swizzle - 16))


@dataclass(frozen=True)
class TilePart:
    """A part of a tile as an operand: `k` columns of K, or rows of K where it is MN-major.

    Attributes:
        row, column: the first ones in the tile.
    """

    tile: SharedTile
    k: int
    row: int = 0
    column: int = 0


@dataclass(frozen=True)
class SharedOperand:
    """A or B of one CTA in shared memory: its K is that of the pieces, one after the other.

    Attributes:
        extent: rows of A or columns of B that this CTA holds.
    """

    major: str
    extent: int
    pieces: tuple[TilePart, ...]

    @property
    def element(self) -> Element:
        return self.pieces[0].tile.element

    @property
    def k(self) -> int:
        return sum(piece.k for piece in self.pieces)

    def place(self, mn: int, k: int) -> tuple[SharedTile, int, int]:
        """Tile, row and column of an element."""
        for piece in self.pieces:
            if k < piece.k:
                row, column = (mn, k) if self.major == "K" else (k, mn)
                return piece.tile, piece.row + row, piece.column + column
            k -= piece.k
        raise IndexError(f"k is beyond the operand's {self.k}")

    def descriptors(self) -> tuple[int, ...]:
        """Descriptors, one for each K step; the address of byte 0 has to be added to their start
        address."""
        found = []
        for first in range(0, self.k, self.element.step_k):
            tile, row, column = self.place(0, first)
            start = tile.offset(row, column)
            # K-major swizzled layouts have no leading dimension: the ISA ignores it, CUTLASS says 1
            leading = 16 if self.major == "K" else tile.box_bytes
            found.append(shared_descriptor(start, leading, 8 * tile.swizzle, tile.swizzle))
        return tuple(found)


@dataclass(frozen=True)
class TmemOperand:
    """A in TMEM, two bf16 a cell.

    Attributes:
        distinct: every group of lanes that computes a part of N holds an A of its own.
    """

    column: int
    k: int
    distinct: bool = False


def shared_descriptor(start: int, leading: int, stride: int, swizzle: int) -> int:
    """The 64 bits of a shared memory descriptor; all in bytes."""
    for name, value in (("start", start), ("leading", leading), ("stride", stride)):
        if value % 16 or not 0 <= value < 1 << 18:
            raise OperandFormError(
                f"{name}: expected a multiple of 16 bytes below 2**18; got {value} ({DESCRIPTORS})"
            )
    fixed = 0b001 << 46
    code = _SWIZZLE_CODES[swizzle] << 61
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | fixed | code


def instruction_descriptor(
    m: int, n: int, a_major: str, b_major: str, element: Element = BF16
) -> int:
    """The 32 bits for operands of one type and an fp32 accumulator."""
    fp32, code = 1, element.code
    majors = int(a_major == "MN") << 15 | int(b_major == "MN") << 16
    return fp32 << 4 | code << 7 | code << 10 | majors | n >> 3 << 17 | m >> 4 << 24


@dataclass(frozen=True)
class UmmaProduct:
    """One matrix product D = A B, a chain of instructions along K.

    Attributes:
        m, n: of the instruction; with cta_group 2 both CTAs' together.
        column: first TMEM column of D.
    """

    m: int
    n: int
    a: SharedOperand | TmemOperand
    b: SharedOperand
    column: int = 0
    cta_group: int = 1
    ws: bool = False

    def __post_init__(self) -> None:
        problem = shape_problem(self.m, self.n, self.cta_group, self.ws, self.element.kind)
        if problem:
            raise OperandFormError(problem)
        self._check_operands()

    def _check_operands(self) -> None:
        step = self.element.step_k
        if self.a.k != self.b.k or self.b.k % step:
            raise OperandFormError(
                f"K of A and B must be the same multiple of {step}; got {self.a.k} and "
                f"{self.b.k} ({SHAPES})"
            )
        if self.b.extent * self.cta_group != self.n:
            raise OperandFormError(
                f"each of {self.cta_group} CTAs holds N / {self.cta_group} columns of B; got "
                f"{self.b.extent} of N = {self.n} ({SHAPES})"
            )
        if isinstance(self.a, SharedOperand) and self.a.extent != self.rows:
            raise OperandFormError(
                f"each of {self.cta_group} CTAs holds M / {self.cta_group} rows of A; got "
                f"{self.a.extent} of M = {self.m} ({SHAPES})"
            )
        if max(self.column + self.columns, self.a_columns.stop) > SM100.tmem_columns:
            raise OperandFormError(
                f"D or A ends behind the {SM100.tmem_columns} columns of TMEM ({TMEM})"
            )

    @property
    def element(self) -> Element:
        return self.b.element

    @property
    def k(self) -> int:
        return self.b.k

    @property
    def rows(self) -> int:
        """Rows of A and D in one CTA."""
        return self.m // self.cta_group

    @property
    def data_path(self) -> str:
        """The letter of the layout of D (PTX ISA, "Data Path Layout Organization")."""
        return _DATA_PATHS[self.m, self.cta_group, self.ws]

    @property
    def parts(self) -> int:
        """Groups of lanes that hold different columns of D."""
        return _COLUMN_PARTS.get(self.data_path, 1)

    @property
    def columns(self) -> int:
        return self.n // self.parts

    @property
    def a_columns(self) -> range:
        """TMEM columns of A; empty where it is in shared memory."""
        if isinstance(self.a, SharedOperand):
            return range(0)
        columns = self.a.k * self.element.bytes // TMEM_CELL_BYTES
        return range(self.a.column, self.a.column + columns)

    @property
    def a_in_tmem(self) -> bool:
        return isinstance(self.a, TmemOperand)

    def cell(self, lane: int, column: int) -> tuple[int, int] | None:
        """Row in this CTA and column of D in a cell of TMEM; None if the cell has no element."""
        offset = column - self.column
        if not 0 <= offset < self.columns:
            return None
        if self.data_path == "F":
            row = 16 * (lane // 32) + lane % 32
            return (row, offset) if lane % 32 < 16 else None
        group = TMEM_LANES // self.parts
        return lane % group, lane // group * self.columns + offset

    @property
    def instruction(self) -> int:
        a_major = self.a.major if isinstance(self.a, SharedOperand) else "K"
        return instruction_descriptor(self.m, self.n, a_major, self.b.major, self.element)

    def steps(self) -> tuple[tuple[int, int], ...]:
        """A (descriptor or TMEM column) and B (descriptor) of every instruction."""
        count = self.k // self.element.step_k
        if isinstance(self.a, SharedOperand):
            left = self.a.descriptors()
        else:
            left = tuple(self.a.column + STEP_COLUMNS * step for step in range(count))
        return tuple(zip(left, self.b.descriptors(), strict=True))


def shape_problem(m: int, n: int, cta_group: int, ws: bool, kind: str = "f16") -> str | None:
    """Why .kind::f16 or .kind::f8f6f4 has no M x N in this form; None where it has."""
    form = f".kind::{kind} with .cta_group::{cta_group}{' and .ws' if ws else ''}"
    if ws and cta_group == 2:
        return f".ws is invalid with .cta_group::2 ({SHAPES})"
    allowed = (32, 64, 128) if ws else (128, 256) if cta_group == 2 else (64, 128)
    if m not in allowed:
        return f"{form} has M = {' or '.join(map(str, allowed))}; got {m} ({SHAPES})"
    if ws:
        wrong = n not in WS_WIDTHS
        return f"{form} has N = 64, 128 or 256; got {n} ({SHAPES})" if wrong else None
    step = 8 if m == 64 else 16
    if n % step or not step <= n <= 256:
        return f"{form} and M = {m} has N from {step} to 256 in steps of {step}; got {n} ({SHAPES})"
    return None
