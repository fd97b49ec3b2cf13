"""Reading operand matrices from shared memory through descriptors, as the async proxy does."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors import Tcgen05Descriptor, WgmmaDescriptor
from ptxemu.descriptors.matrix_layout import (
    CHUNK,
    ChunkPlan,
    Major,
    MatrixLayout,
    chunk_plan,
)
from ptxemu.descriptors.swizzle import PERIOD
from ptxemu.errors import ExecutionError
from ptxemu.events import AccessKind, Proxy, Space
from ptxemu.machine.access import report
from ptxemu.machine.engine_state import EngineState
from ptxemu.numerics import dot

if TYPE_CHECKING:
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.operation import AsyncOperation

Descriptor: TypeAlias = WgmmaDescriptor | Tcgen05Descriptor


def _as_chunks(cta: Cta) -> NDArray[np.complex128]:
    whole = len(cta.shared) // CHUNK * CHUNK
    return cta.shared[:whole].view(np.complex128)


def _address(cta: Cta) -> int:
    return int(cta.shared.ctypes.data)


_chunks_of = EngineState(_as_chunks)
"""A CTA's shared memory in units of 16 bytes, which NumPy moves fastest as complex numbers."""

address_of_shared = EngineState(_address)
"""The address of a CTA's shared memory, for machine code."""


def read_chunks(
    operation: AsyncOperation,
    cta: Cta,
    descriptor: Descriptor,
    major: Major,
    lines: int,
    chunks: int,
) -> NDArray[np.uint8]:
    """The bytes (lines, 16 * chunks) of a matrix, reported as read by `operation`.

    Raises:
        ExecutionError: the matrix is not all in the CTA's shared memory.
    """
    plan, base = find_chunks(operation, cta, descriptor, major, lines, chunks)
    found = _chunks_of(cta).take(plan.chunks + (base >> 4))
    return found.view(np.uint8).reshape(lines, CHUNK * chunks)


def find_chunks(
    operation: AsyncOperation,
    cta: Cta,
    descriptor: Descriptor,
    major: Major,
    lines: int,
    chunks: int,
) -> tuple[ChunkPlan, int]:
    """Where a matrix is, relative to an offset in shared memory; reported as read by `operation`.

    Raises:
        ExecutionError: the matrix is not all in the CTA's shared memory.
    """
    start = descriptor.start_address
    plan = _plan_of(descriptor, major, lines, chunks)
    base = start - start % PERIOD
    if base + plan.end > len(cta.shared) // CHUNK * CHUNK:
        instruction = operation.instruction
        raise ExecutionError(
            f"{instruction.span}: {instruction.opcode}: the matrix of {descriptor} reaches shared "
            f"0x{base + plan.end:x}, beyond the CTA's {len(cta.shared)} bytes"
        )
    _report(operation, cta, plan, base)
    return plan, base


@lru_cache(maxsize=4096)
def _plan_of(descriptor: Descriptor, major: Major, lines: int, chunks: int) -> ChunkPlan:
    return chunk_plan(MatrixLayout.of(descriptor, major, lines, chunks))


def read_matrix(
    operation: AsyncOperation,
    cta: Cta,
    descriptor: Descriptor,
    major: Major,
    shape: tuple[int, int],
    type_: str,
    packing: str = "natural",
) -> NDArray[np.float64]:
    """The numbers (mn, k) of an operand matrix of `shape` (mn, k)."""
    mn, k = shape
    per_chunk = dot.elements_per_chunk(type_, packing)
    lines, along = (mn, k) if major is Major.K else (k, mn)
    raw = read_chunks(operation, cta, descriptor, major, lines, along // per_chunk)
    numbers = dot.numbers(raw, type_, packing)
    return numbers if major is Major.K else numbers.T


def _report(operation: AsyncOperation, cta: Cta, plan: ChunkPlan, base: int) -> None:
    machine = cta.machine
    if machine.observer is not None:
        report(
            machine,
            operation,
            Space.SHARED,
            cta,
            plan.starts + base,
            plan.size,
            AccessKind.READ,
            operation.instruction,
            proxy=Proxy.ASYNC,
        )
