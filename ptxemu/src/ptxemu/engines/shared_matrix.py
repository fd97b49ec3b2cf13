"""Reading operand matrices from shared memory through descriptors, as the async proxy does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ptxemu.descriptors import Tcgen05Descriptor, WgmmaDescriptor
from ptxemu.descriptors.matrix_layout import CHUNK, ChunkPlan, Major, MatrixLayout, chunk_plan
from ptxemu.descriptors.swizzle import PERIOD
from ptxemu.errors import fault
from ptxemu.events import AccessKind, Proxy
from ptxemu.machine.engine_state import EngineState
from ptxemu.machine.regions import report
from ptxemu.machine.state import AsyncOperation, Cta
from ptxemu.numerics import dot

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


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A matrix in the shared memory of whichever CTA.

    Attributes:
        base: the offset that `plan` counts from; end: the offset after the last byte.
        starts: offsets of disjoint pieces of `plan.size` bytes.
    """

    descriptor: Descriptor
    plan: ChunkPlan
    base: int
    end: int
    starts: NDArray[np.int64]


@lru_cache(maxsize=4096)
def place(descriptor: Descriptor, major: Major, lines: int, chunks: int) -> Placed:
    """Return the positions of the (lines, 16 * chunks) bytes of a matrix."""
    plan = chunk_plan(MatrixLayout.of(descriptor, major, lines, chunks))
    start = descriptor.start_address
    base = start - start % PERIOD
    starts = plan.starts + base
    starts.flags.writeable = False
    return Placed(descriptor, plan, base, base + plan.end, starts)


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
    placed = place(descriptor, major, lines, chunks)
    report_read(operation, cta, placed)
    found = _chunks_of(cta).take(placed.plan.chunks + (placed.base >> 4))
    return found.view(np.uint8).reshape(lines, CHUNK * chunks)


def report_read(operation: AsyncOperation, cta: Cta, placed: Placed) -> None:
    """Tell that `operation` reads a matrix.

    Raises:
        ExecutionError: the matrix is not all in the CTA's shared memory.
    """
    if placed.end > len(cta.shared) // CHUNK * CHUNK:
        instruction = operation.instruction
        fault(
            instruction,
            f"the matrix of {placed.descriptor} reaches "
            f"shared 0x{placed.end:x}, beyond the CTA's {len(cta.shared)} bytes",
        )
    if cta.machine.observer is not None:
        starts, size = placed.starts, placed.plan.size
        report(operation, cta, starts, size, AccessKind.READ, proxy=Proxy.ASYNC)


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
