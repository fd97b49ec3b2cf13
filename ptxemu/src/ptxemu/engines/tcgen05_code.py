"""A tcgen05.mma in machine code, for the types that it knows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors import BlockScaledInstructionDescriptor, Tcgen05Descriptor
from ptxemu.descriptors.matrix_layout import CHUNK, Major
from ptxemu.engines.forms import Decoded, Matrix, Product
from ptxemu.engines.shared_matrix import address_of_shared, place, report_read
from ptxemu.engines.tmem_access import access_tmem
from ptxemu.events import AccessKind
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.state import AsyncOperation, Cta
from ptxemu.memory.tmem import LANE_BYTES, Block, accumulator_blocks

_TYPES = ("bf16", "f16")
_K, _PER_CHUNK, _DOUBLE, _WORD = 16, 8, 8, 4
_MOST_ROWS, _MOST_COLUMNS = 128, 256
_left, _right = np.empty((_MOST_ROWS, _K)), np.empty((_K, _MOST_COLUMNS))
_LEFT, _RIGHT = (int(array.ctypes.data) for array in (_left, _right))
_ROW_OF_A, _ROW_OF_B = _K * _DOUBLE, _MOST_COLUMNS * _DOUBLE
_address_of_tmem: EngineState[Cta, int] = EngineState(lambda cta: int(cta.tmem.ctypes.data))


def product(decoded: Decoded) -> Product | None:
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


def execute(
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
    instruction = operation.instruction
    access_tmem(cta, operation, instruction, AccessKind.READ, lanes, product.a_column, width)
    chunks = _chunks_of_lanes(int(lanes[0]), block.count, product.a_column)
    read = code.chunk_reader(product.type_a)
    read(_address_of_tmem(cta), int(chunks.ctypes.data), chunks.size, _LEFT)


def _access_d(operation: AsyncOperation, cta: Cta, product: Product, block: Block) -> None:
    lanes = _lanes(block.lane + product.lane, block.count)
    kinds = (AccessKind.READ, AccessKind.WRITE) if product.accumulate else (AccessKind.WRITE,)
    for kind in kinds:
        access_tmem(cta, operation, operation.instruction, kind, lanes, product.column, block.width)


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
