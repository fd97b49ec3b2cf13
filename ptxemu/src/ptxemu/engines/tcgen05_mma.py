"""tcgen05.mma: D = A * B + D on TMEM.

Every group of lanes that holds a part of D multiplies the A that it holds itself, when A is in
TMEM. So the rows of A must be there twice for data path B, and .ws with M = 64 or 32 computes with
two or four different A's if the lanes hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu import machine_code
from ptxemu.descriptors import BlockScaledInstructionDescriptor, Tcgen05Descriptor, ZeroColumnMask
from ptxemu.descriptors.matrix_layout import CHUNK, Major
from ptxemu.engines.forms import Decoded, Matrix, MmaOperands, Product
from ptxemu.engines.mma_plan import MmaForm, mma_plan
from ptxemu.engines.shared_matrix import address_of_shared, place, read_matrix, report_read
from ptxemu.engines.sparse_metadata import expanded, nibbles, warn_of_undefined
from ptxemu.engines.tcgen05 import ctas_of, start_mma
from ptxemu.engines.tmem_allocator import access_tmem
from ptxemu.errors import ExecutionError
from ptxemu.events import AccessKind
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.state import AsyncOperation, Cta, Warp
from ptxemu.memory import tmem
from ptxemu.memory.tmem import LANE_BYTES, Block, accumulator_blocks
from ptxemu.numerics import dot
from ptxemu.syntax.ast import Instruction

Values: TypeAlias = NDArray[np.float64]

# A tcgen05.mma in machine code, for the types that it knows.

_TYPES = ("bf16", "f16")
_K, _PER_CHUNK, _DOUBLE, _WORD = 16, 8, 8, 4
_MOST_ROWS, _MOST_COLUMNS = 128, 256
_left, _right = np.empty((_MOST_ROWS, _K)), np.empty((_K, _MOST_COLUMNS))
_LEFT, _RIGHT = (int(array.ctypes.data) for array in (_left, _right))
_ROW_OF_A, _ROW_OF_B = _K * _DOUBLE, _MOST_COLUMNS * _DOUBLE
_address_of_tmem: EngineState[Cta, int] = EngineState(lambda cta: int(cta.tmem.ctypes.data))


def _product_in_machine_code(decoded: Decoded) -> Product | None:
    """The product of the operands; None where machine code does not know it."""
    form, operands, plan = decoded.form, decoded.operands, decoded.plan
    descriptor: Any = plan.descriptor
    if (
        isinstance(descriptor, BlockScaledInstructionDescriptor)
        or descriptor.dtype != "f32"
        or descriptor.atype not in _TYPES
        or descriptor.btype not in _TYPES
        or form.sparse
        or operands.scale_d
        or operands.disabled_lanes
        or operands.zero_mask
        or decoded.a_column % (CHUNK // _WORD)  # it takes tensor memory in chunks
    ):
        return None
    columns, rows = descriptor.n // form.cta_group, descriptor.m // form.cta_group
    a = None
    if decoded.a is not None:
        along = (_ROW_OF_A, _DOUBLE)
        a = _matrix(descriptor.atype, decoded.a, decoded.a_major, rows, along)
    return Product(
        descriptor.atype,
        a,
        decoded.a_column,
        _matrix(descriptor.btype, decoded.b, decoded.b_major, columns, (_DOUBLE, _ROW_OF_B)),
        columns,
        decoded.lane,
        decoded.column,
        accumulator_blocks(plan.path, descriptor.n),
        operands.accumulate,
        descriptor.negate_a != descriptor.negate_b,
    )


def _matrix(
    type_: str, descriptor: Tcgen05Descriptor, major: Major, mn: int, along: tuple[int, int]
) -> Matrix:
    """A matrix (mn, k) whose numbers go to where neighbours along mn and k are so far apart."""
    along_mn, along_k = along
    if major is Major.K:
        placed = place(descriptor, major, mn, _K // _PER_CHUNK)
        strides = (along_mn, _PER_CHUNK * along_k, along_k)
    else:
        placed = place(descriptor, major, _K, mn // _PER_CHUNK)
        strides = (along_k, _PER_CHUNK * along_mn, along_mn)
    return Matrix(type_, placed, (placed.plan.address, *placed.plan.chunks.shape), strides)


def _execute_in_machine_code(
    code: ModuleType, operation: AsyncOperation, ctas: Sequence[Cta], product: Product
) -> None:
    """Read the sources and write D in every CTA (`code`: `ptxemu.compiled.products`)."""
    for rank, cta in enumerate(ctas):
        to = _RIGHT + rank * product.columns * _DOUBLE
        _read_shared(code, operation, cta, product.b, to)
    if product.is_negated:
        np.negative(_right, out=_right)
    for cta in ctas:
        if product.a is not None:
            _read_shared(code, operation, cta, product.a, _LEFT)
        for block in product.blocks:
            first = block.row
            if product.a is None:
                _read_tmem(code, operation, cta, product, block)
                first = 0
            _access_d(operation, cta, product, block)
            lane = block.lane + product.lane
            code.row_product(_K)(
                _LEFT + first * _ROW_OF_A,
                _RIGHT + block.n * _DOUBLE,
                block.width,
                block.count,
                _address_of_tmem(cta) + lane * LANE_BYTES + product.column * _WORD,
                LANE_BYTES,
                product.accumulate,
            )


def _read_shared(
    code: ModuleType, operation: AsyncOperation, cta: Cta, matrix: Matrix, to: int
) -> None:
    report_read(operation, cta, matrix.placed)
    memory = address_of_shared(cta) + matrix.placed.base
    code.matrix_reader(matrix.type)(memory, *matrix.reading, to, *matrix.strides)


def _read_tmem(
    code: ModuleType, operation: AsyncOperation, cta: Cta, product: Product, block: Block
) -> None:
    """A's rows of a block, from the lanes that hold them in tensor memory."""
    lanes, width = _lanes(block.lane + product.lane, block.count), _K // 2
    access_tmem(operation, cta, AccessKind.READ, lanes, product.a_column, width)
    chunks = _chunks_of_lanes(int(lanes[0]), block.count, product.a_column)
    read = code.chunk_reader(product.type_a)
    read(_address_of_tmem(cta), int(chunks.ctypes.data), chunks.size, _LEFT)


def _access_d(operation: AsyncOperation, cta: Cta, product: Product, block: Block) -> None:
    lanes = _lanes(block.lane + product.lane, block.count)
    kinds = (AccessKind.READ, AccessKind.WRITE) if product.accumulate else (AccessKind.WRITE,)
    for kind in kinds:
        access_tmem(operation, cta, kind, lanes, product.column, block.width)


@cache
def _lanes(first: int, count: int) -> NDArray[np.int64]:
    lanes = np.arange(first, first + count)
    lanes.flags.writeable = False
    return lanes


@cache
def _chunks_of_lanes(first: int, count: int, column: int) -> NDArray[np.int64]:
    """Numbers of the chunks of A's rows, from a column of tensor memory on."""
    within = np.arange(_K // _PER_CHUNK) + column * _WORD // CHUNK
    return _lanes(first, count)[:, None] * (LANE_BYTES // CHUNK) + within


@lru_cache(maxsize=4096)
def decoded(form: MmaForm, operands: MmaOperands) -> Decoded:
    """Read what a form and its operands say, once for each value.

    Raises:
        ValueError: a descriptor or an address that the ISA does not allow.
    """
    found = Decoded(form, operands, mma_plan(form, operands.instruction_descriptor))
    found.code = _product_in_machine_code(found)
    return found


def issue_mma(
    warp: Warp, lane: int, instruction: Instruction, form: MmaForm, operands: MmaOperands
) -> None:
    """Start a product for one thread.

    Raises:
        ExecutionError: a descriptor or an address that the ISA does not allow.
    """
    try:
        ctas = ctas_of(warp.cta, form.cta_group, instruction, warp)
        product = decoded(form, operands)
    except ValueError as error:
        raise ExecutionError(f"{instruction.span}: {instruction.opcode}: {error}") from error
    for problem in product.problems:
        warp.cta.machine.complain("error", "invalid-descriptor", problem, warp, instruction)
    operation = start_mma(warp, lane, instruction, product.key, product.tmem_operands)
    operation.shape = product.shape
    operation.steps.append(_Product(operation, product, ctas).execute)
    warp.cta.machine.issue(operation)


class _Product:
    """One tcgen05.mma under way."""

    def __init__(self, operation: AsyncOperation, product: Decoded, ctas: list[Cta]) -> None:
        self._operation, self._product, self._ctas = operation, product, ctas
        self._form, self._operands, self._plan = product.form, product.operands, product.plan
        self._descriptor = product.plan.descriptor

    def execute(self) -> None:
        """Read the sources and write D in every CTA."""
        product = self._product
        code = None if product.code is None else machine_code.products(self._ctas[0])
        if product.code is not None and code is not None:
            _execute_in_machine_code(code, self._operation, self._ctas, product.code)
            return
        right = self._read_b()
        for rank, cta in enumerate(self._ctas):
            self._execute_in(cta, rank, right)

    def _read_b(self) -> Values:
        """B (n, k): every CTA has its part of the columns."""
        descriptor = self._descriptor
        mask = ZeroColumnMask.decode(self._operands.zero_mask)
        columns = descriptor.n // len(self._ctas)
        packing = self._plan.packing(descriptor.btype, in_tmem=False)
        shape = (columns + mask.column_shift, self._plan.k)
        parts = [
            read_matrix(
                self._operation,
                cta,
                self._product.b,
                self._product.b_major,
                shape,
                descriptor.btype,
                packing,
            )[mask.column_shift :]
            for cta in self._ctas
        ]
        right = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if mask.is_nonzero:
            right = np.where(mask.zero_columns(descriptor.m, descriptor.n)[:, None], 0.0, right)
        return -right if descriptor.negate_b != descriptor.negate_a else right

    def _execute_in(self, cta: Cta, rank: int, right: Values) -> None:
        descriptor = self._descriptor
        rows = descriptor.m // len(self._ctas)
        left_scales = None
        if isinstance(descriptor, BlockScaledInstructionDescriptor):
            ids = descriptor.scale_factor_a_id, descriptor.scale_factor_b_id
            left_scales = self._scales(cta, self._operands.scale_a, rows, ids[0], halves=False)
            halves = self._plan.path is tmem.DataPath.B
            scale_b = self._scales(cta, self._operands.scale_b, descriptor.n, ids[1], halves=halves)
            right = right * scale_b
        whole: Values | None = None
        stored: Values | None = None
        if self._product.a is not None:
            packing = self._plan.packing(descriptor.atype, in_tmem=False)
            stored = read_matrix(
                self._operation,
                cta,
                self._product.a,
                self._product.a_major,
                (rows, self._plan.kept),
                descriptor.atype,
                packing,
            )
            if not self._form.sparse:
                left = stored if left_scales is None else stored * left_scales
                whole = dot.product(left, right)
        for block in tmem.accumulator_blocks(self._plan.path, descriptor.n):
            of_rows = slice(block.row, block.row + block.count)
            of_columns = slice(block.n, block.n + block.width)
            if whole is not None:
                sums = whole[of_rows, of_columns]
            else:
                left = self._a_from_tmem(cta, block) if stored is None else stored[of_rows]
                if self._form.sparse:
                    metadata = self._metadata(cta, block)
                    left = expanded(left, metadata, descriptor.atype)
                if left_scales is not None:
                    left = left * left_scales[of_rows]
                sums = dot.product(left, right[of_columns])
            self._write_d(cta, rank, block, sums)

    def _a_from_tmem(self, cta: Cta, block: tmem.Block) -> Values:
        descriptor = self._descriptor
        packing = self._plan.packing(descriptor.atype, in_tmem=True)
        width = self._plan.kept * 4 // dot.elements_per_chunk(descriptor.atype, packing)
        first = block.lane + self._product.lane
        lanes = np.arange(first, first + block.count)
        access_tmem(self._operation, cta, AccessKind.READ, lanes, self._product.a_column, width)
        words = cta.tmem[
            first : first + block.count, self._product.a_column : self._product.a_column + width
        ]
        raw = np.ascontiguousarray(words).view(np.uint8)
        return dot.numbers(raw, descriptor.atype, packing)

    def _metadata(self, cta: Cta, block: tmem.Block) -> NDArray[np.uint32]:
        """Four-bit values (rows, chunks along k), from the lanes that hold D's rows.

        Of f16 and tf32 a cell has 16 bits of row r in its low half and of row r + 8 in its high
        half; of every 16 lanes the second 8 have the second half of k, and the selector names the
        column. Of other kinds a lane has its row's 64 bits in two columns.
        """
        operation, descriptor = self._operation, self._descriptor
        _, column = tmem.split_address(self._operands.metadata)
        column += getattr(descriptor, "sparsity_selector", 0)
        halves = descriptor.kind in ("f16", "tf32")
        width = 1 if halves else 2
        lanes = np.arange(block.lane, block.lane + block.count)
        access_tmem(self._operation, cta, AccessKind.READ, lanes, column, width)
        words = cta.tmem[block.lane : block.lane + block.count, column : column + width]
        if halves:
            cells = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 2, 8, 2)
            parts = cells.transpose(0, 3, 2, 1).reshape(block.count, 2)
            found = nibbles(parts)[..., :4].reshape(block.count, -1)
        else:
            found = nibbles(words).reshape(block.count, -1)
        warn_of_undefined(cta, operation, operation.instruction, found, descriptor.atype)
        return found

    def _scales(self, cta: Cta, address: int, rows: int, id_: int, *, halves: bool) -> Values:
        """The factor of every element (rows, k)."""
        descriptor = self._descriptor
        assert isinstance(descriptor, BlockScaledInstructionDescriptor)
        count = self._form.scale_count
        # NOTE: compiled code keeps the scale factor ID in the two highest bits of the address too.
        first_lane, column = tmem.split_address(address & 0x3FFFFFFF)
        if first_lane:
            raise ExecutionError(
                f"{self._operation.instruction.span}: scale factors at TMEM lane {first_lane}: "
                "expected lane 0"
            )
        found = []
        for block in tmem.scale_blocks(rows, halves):
            columns = -(-block.count // tmem.PARTITION)
            copies = []
            for lane in block.lanes:
                lanes = np.arange(lane, lane + tmem.PARTITION)
                access_tmem(self._operation, cta, AccessKind.READ, lanes, column, columns)
                words = cta.tmem[lane : lane + tmem.PARTITION, column : column + columns].T
                raw = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 4)
                copies.append(raw[: block.count, id_ : id_ + count])
            if any(not np.array_equal(copies[0], other) for other in copies[1:]):
                cta.machine.complain(
                    "error",
                    "scale-factor-copies",
                    f"the scale factors at TMEM column {column} are not the same in all groups of "
                    'lanes (PTX ISA, "Block Scaling")',
                    self._operation,
                    self._operation.instruction,
                )
            found.append(copies[0])
        factors = dot.scales(np.concatenate(found), descriptor.scale_type)
        return np.repeat(factors, self._plan.k // count, axis=1)

    def _write_d(self, cta: Cta, rank: int, block: tmem.Block, sums: Values) -> None:
        first = block.lane + self._product.lane
        lanes = np.arange(first, first + block.count)
        disabled = self._operands.disabled_lanes >> tmem.LANES * rank & ((1 << tmem.LANES) - 1)
        if disabled:
            enabled = np.array([not disabled >> int(lane) & 1 for lane in lanes])
            lanes, sums = lanes[enabled], sums[enabled]
        column, width = self._product.column, block.width
        accumulate = self._operands.accumulate
        if accumulate:
            access_tmem(self._operation, cta, AccessKind.READ, lanes, column, width)
        access_tmem(self._operation, cta, AccessKind.WRITE, lanes, column, width)
        where: tuple[slice | NDArray[np.int64], slice]
        where = (slice(first, first + block.count), slice(column, column + width))
        if disabled:
            where = (lanes, slice(column, column + width))
        cta.tmem[where] = dot.accumulated(
            cta.tmem[where] if accumulate else None,
            sums,
            self._descriptor.dtype,
            scale=2.0**-self._operands.scale_d,
            saturate=getattr(self._descriptor, "saturate", False),
        )
