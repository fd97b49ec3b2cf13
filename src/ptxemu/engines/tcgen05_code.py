"""A tcgen05.mma in machine code, for the types that it knows."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxemu.descriptors import BlockScaledInstructionDescriptor
from ptxemu.descriptors.matrix_layout import CHUNK, Major
from ptxemu.engines.shared_matrix import address_of_shared, find_chunks
from ptxemu.engines.tmem_access import access_tmem
from ptxemu.events import AccessKind
from ptxemu.machine.engine_state import EngineState
from ptxemu.memory.tmem import LANE_BYTES, Block, accumulator_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ptxemu.descriptors import Tcgen05Descriptor
    from ptxemu.engines.mma_plan import MmaForm, MmaPlan
    from ptxemu.engines.tcgen05_mma import MmaOperands
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.operation import AsyncOperation

_TYPES = ("bf16", "f16")
_K, _PER_CHUNK, _DOUBLE, _WORD = 16, 8, 8, 4
_MOST_ROWS, _MOST_COLUMNS = 128, 256
_left, _raw = np.empty((_MOST_ROWS, _K)), np.empty(_MOST_COLUMNS * _K)
_right = np.empty((_K, _MOST_COLUMNS))
_LEFT, _RAW, _RIGHT = (int(array.ctypes.data) for array in (_left, _raw, _right))
_address_of_tmem: EngineState[Cta, int] = EngineState(lambda cta: int(cta.tmem.ctypes.data))


@dataclass(frozen=True, slots=True)
class MmaPlaces:
    """Where the matrices of a product are.

    Attributes:
        a: A's descriptor, None where A is in tensor memory, from column `a_column` on.
        lane, column: D's first one.
    """

    a: Tcgen05Descriptor | None
    a_major: Major
    a_column: int
    b: Tcgen05Descriptor
    b_major: Major
    lane: int
    column: int


def is_known(form: MmaForm, plan: MmaPlan, operands: MmaOperands) -> bool:
    """Whether machine code knows a product of this kind."""
    descriptor: Any = plan.descriptor
    return (
        not isinstance(descriptor, BlockScaledInstructionDescriptor)
        and descriptor.dtype == "f32"
        and descriptor.atype in _TYPES
        and descriptor.btype in _TYPES
        and not (form.sparse or operands.scale_d or operands.disabled_lanes or operands.zero_mask)
    )


def execute(
    code: ModuleType,
    operation: AsyncOperation,
    ctas: Sequence[Cta],
    plan: MmaPlan,
    places: MmaPlaces,
    accumulate: bool,
) -> None:
    """Read the sources and write D in every CTA (`code`: `ptxemu.compiled.products`)."""
    descriptor: Any = plan.descriptor
    columns = descriptor.n // len(ctas)
    read_a, read_b = (code.chunk_reader(t) for t in (descriptor.atype, descriptor.btype))
    for rank, cta in enumerate(ctas):
        found = _read_shared(read_b, operation, cta, (places.b, places.b_major), columns)
        _right[:, rank * columns : (rank + 1) * columns] = found.T
    if descriptor.negate_a != descriptor.negate_b:
        np.negative(_right, out=_right)
    rows = descriptor.m // len(ctas)
    for cta in ctas:
        if places.a is not None:
            _left[:rows] = _read_shared(read_a, operation, cta, (places.a, places.a_major), rows)
        for block in accumulator_blocks(plan.path, descriptor.n):
            first = block.row
            if places.a is None:
                _read_tmem(read_a, operation, cta, places, block)
                first = 0
            _access_d(operation, cta, places, block, accumulate)
            lane = block.lane + places.lane
            code.row_product(_K)(
                _LEFT + first * _K * _DOUBLE,
                _RIGHT + block.n * _DOUBLE,
                block.width,
                block.count,
                _address_of_tmem(cta) + lane * LANE_BYTES + places.column * _WORD,
                LANE_BYTES,
                accumulate,
            )


def _read_shared(
    read: Any,
    operation: AsyncOperation,
    cta: Cta,
    matrix: tuple[Tcgen05Descriptor, Major],
    lines: int,
) -> NDArray[np.float64]:
    """A matrix in shared memory (lines, k), which is gone with the next one that is read."""
    descriptor, major = matrix
    shape = (lines, _K) if major is Major.K else (_K, lines)
    plan, base = find_chunks(operation, cta, descriptor, major, shape[0], shape[1] // _PER_CHUNK)
    read(address_of_shared(cta) + base, plan.address, plan.chunks.size, _RAW)
    found = _raw[: lines * _K].reshape(shape)
    return found if major is Major.K else found.T


def _read_tmem(
    read: Any, operation: AsyncOperation, cta: Cta, places: MmaPlaces, block: Block
) -> None:
    """A's rows of a block, from the lanes that hold them in tensor memory."""
    first, width = block.lane + places.lane, _K // 2
    lanes = np.arange(first, first + block.count)
    instruction = operation.instruction
    access_tmem(cta, operation, instruction, AccessKind.READ, lanes, places.a_column, width)
    within = np.arange(_K // _PER_CHUNK) + places.a_column * _WORD // CHUNK
    chunks = lanes[:, None] * (LANE_BYTES // CHUNK) + within
    read(_address_of_tmem(cta), int(chunks.ctypes.data), chunks.size, _LEFT)


def _access_d(
    operation: AsyncOperation, cta: Cta, places: MmaPlaces, block: Block, accumulate: bool
) -> None:
    first = block.lane + places.lane
    lanes = np.arange(first, first + block.count)
    kinds = (AccessKind.READ, AccessKind.WRITE) if accumulate else (AccessKind.WRITE,)
    for kind in kinds:
        access_tmem(cta, operation, operation.instruction, kind, lanes, places.column, block.width)
