"""tcgen05.mma: D = A * B + D on TMEM.

Every group of lanes that holds a part of D multiplies the A that it holds itself, when A is in
TMEM. So the rows of A must be there twice for data path B, and .ws with M = 64 or 32 computes with
two or four different A's if the lanes hold them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ptxemu import machine_code
from ptxemu.descriptors import BlockScaledInstructionDescriptor, ZeroColumnMask
from ptxemu.engines import tcgen05_code
from ptxemu.engines.forms import Decoded, MmaOperands
from ptxemu.engines.mma_plan import MmaForm, mma_plan
from ptxemu.engines.shared_matrix import read_matrix
from ptxemu.engines.sparse_metadata import warn_of_undefined
from ptxemu.engines.tcgen05 import ctas_of, start_mma
from ptxemu.engines.tmem_access import access_tmem
from ptxemu.errors import ExecutionError
from ptxemu.events import AccessKind
from ptxemu.machine.state import AsyncOperation, Cta, Warp
from ptxemu.memory import tmem
from ptxemu.numerics import dot, sparsity
from ptxemu.syntax.ast import Instruction

# The operands of a tcgen05.mma, decoded once for each value.


@lru_cache(maxsize=4096)
def decoded(form: MmaForm, operands: MmaOperands) -> Decoded:
    """Read what a form and its operands say.

    Raises:
        ValueError: a descriptor or an address that the ISA does not allow.
    """
    found = Decoded(form, operands, mma_plan(form, operands.instruction_descriptor))
    found.code = tcgen05_code.product(found)
    return found


Matrix = NDArray[np.float64]


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
            tcgen05_code.execute(code, self._operation, self._ctas, product.code)
            return
        right = self._read_b()
        for rank, cta in enumerate(self._ctas):
            self._execute_in(cta, rank, right)

    def _read_b(self) -> Matrix:
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

    def _execute_in(self, cta: Cta, rank: int, right: Matrix) -> None:
        descriptor = self._descriptor
        rows = descriptor.m // len(self._ctas)
        left_scales = None
        if isinstance(descriptor, BlockScaledInstructionDescriptor):
            ids = descriptor.scale_factor_a_id, descriptor.scale_factor_b_id
            left_scales = self._scales(cta, self._operands.scale_a, rows, ids[0], halves=False)
            halves = self._plan.path is tmem.DataPath.B
            scale_b = self._scales(cta, self._operands.scale_b, descriptor.n, ids[1], halves=halves)
            right = right * scale_b
        whole: Matrix | None = None
        stored: Matrix | None = None
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
                    left = sparsity.expanded(left, metadata, descriptor.atype)
                if left_scales is not None:
                    left = left * left_scales[of_rows]
                sums = dot.product(left, right[of_columns])
            self._write_d(cta, rank, block, sums)

    def _a_from_tmem(self, cta: Cta, block: tmem.Block) -> Matrix:
        descriptor = self._descriptor
        packing = self._plan.packing(descriptor.atype, in_tmem=True)
        width = self._plan.kept * 4 // dot.elements_per_chunk(descriptor.atype, packing)
        first = block.lane + self._product.lane
        lanes = np.arange(first, first + block.count)
        self._access(cta, AccessKind.READ, lanes, self._product.a_column, width)
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
        self._access(cta, AccessKind.READ, lanes, column, width)
        words = cta.tmem[block.lane : block.lane + block.count, column : column + width]
        if halves:
            cells = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 2, 8, 2)
            parts = cells.transpose(0, 3, 2, 1).reshape(block.count, 2)
            found = sparsity.nibbles(parts)[..., :4].reshape(block.count, -1)
        else:
            found = sparsity.nibbles(words).reshape(block.count, -1)
        warn_of_undefined(cta, operation, operation.instruction, found, descriptor.atype)
        return found

    def _scales(self, cta: Cta, address: int, rows: int, id_: int, *, halves: bool) -> Matrix:
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
                self._access(cta, AccessKind.READ, lanes, column, columns)
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

    def _write_d(self, cta: Cta, rank: int, block: tmem.Block, sums: Matrix) -> None:
        first = block.lane + self._product.lane
        lanes = np.arange(first, first + block.count)
        disabled = self._operands.disabled_lanes >> tmem.LANES * rank & ((1 << tmem.LANES) - 1)
        if disabled:
            enabled = np.array([not disabled >> int(lane) & 1 for lane in lanes])
            lanes, sums = lanes[enabled], sums[enabled]
        column, width = self._product.column, block.width
        accumulate = self._operands.accumulate
        if accumulate:
            self._access(cta, AccessKind.READ, lanes, column, width)
        self._access(cta, AccessKind.WRITE, lanes, column, width)
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

    def _access(
        self, cta: Cta, kind: AccessKind, lanes: NDArray[np.int64], column: int, columns: int
    ) -> None:
        operation = self._operation
        access_tmem(cta, operation, operation.instruction, kind, lanes, column, columns)
