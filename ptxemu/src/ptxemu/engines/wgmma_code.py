"""A warp's part of a wgmma in machine code, for the types that it knows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ptxemu import machine_code
from ptxemu.descriptors import WgmmaDescriptor
from ptxemu.descriptors.matrix_layout import CHUNK, Major
from ptxemu.engines.shared_matrix import Placed, address_of_shared, place, report_read
from ptxemu.machine.register_file import RegisterLayout
from ptxemu.machine.state import AsyncOperation

if TYPE_CHECKING:
    from ptxemu.engines.forms import WgmmaForm

_K, _PER_CHUNK = 16, 8
_ROWS, _ALL_ROWS, _MOST_COLUMNS = 16, 64, 256
_DOUBLE = 8
_left = np.empty(_ALL_ROWS * _K)
_right = np.empty(_MOST_COLUMNS * _K)
_LEFT, _RIGHT = int(_left.ctypes.data), int(_right.ctypes.data)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Reads and product of one warp of four, wherever its registers and its CTA are.

    Attributes:
        a, b: where the matrices are; `a` is None where A is in registers.
        chunks_of_a: addresses of the numbers of A's chunks, and how many; chunks_of_b: of B's.
        left, right: first element, bytes between rows and between columns, of A's 16 rows, and
            between columns and between rows of B, which has been read.
        d: address of the offsets of D's registers; kept: arrays whose addresses these are.
    """

    a: Placed | None
    b: Placed
    chunks_of_a: tuple[int, int]
    chunks_of_b: tuple[int, int]
    left: tuple[int, int, int]
    right: tuple[int, int, int]
    d: int
    kept: object


def execute(
    operation: AsyncOperation, form: WgmmaForm, a: int | None, b: int, accumulate: bool
) -> bool:
    """Read A, B and D and write D; False, and nothing done, where machine code is not to do it.

    Args:
        a, b: descriptors, as their bits; `a` is None where A is in registers.
    """
    warp = operation.issuer
    registers, cta = warp.registers, warp.cta
    if not form.is_plain:
        return False
    code = machine_code.products(cta)
    if code is None:
        return False
    part = _part(registers.layout, form, a, b, warp.index % 4)
    read = code.chunk_reader(form.atype)
    shared = address_of_shared(cta)
    if part.a is None:
        read(registers.address, *part.chunks_of_a, _LEFT)
    else:
        report_read(operation, cta, part.a)
        read(shared + part.a.base, *part.chunks_of_a, _LEFT)
    report_read(operation, cta, part.b)
    code.chunk_reader(form.btype)(shared + part.b.base, *part.chunks_of_b, _RIGHT)
    operation.sources_read = True
    code.fragment_product(_K)(
        *part.left,
        *part.right,
        form.n,
        registers.address,
        part.d,
        accumulate,
        form.negate_a != form.negate_b,
    )
    return True


@lru_cache(maxsize=4096)
def _part(layout: RegisterLayout, form: WgmmaForm, a: int | None, b: int, warp: int) -> _Part:
    """Return the part of warp `warp` of a warpgroup."""
    first = _ROWS * warp
    left, row_bytes, column_bytes = _LEFT, _K * _DOUBLE, _DOUBLE
    placed, chunks = None, _chunks_in_registers(layout, form)
    if a is not None:
        matrix = WgmmaDescriptor.decode(a)
        if form.a_major is Major.K:
            offset = first // 8 * matrix.stride_dimension_byte_offset
            matrix = replace(matrix, start_address=matrix.start_address + offset)
            placed = place(matrix, Major.K, _ROWS, _K // _PER_CHUNK)
        else:
            placed = place(matrix, Major.MN, _K, _ALL_ROWS // _PER_CHUNK)
            left += first * _DOUBLE
            row_bytes, column_bytes = _DOUBLE, _ALL_ROWS * _DOUBLE
        chunks = placed.plan.chunks
    is_k = form.b_major is Major.K
    lines, along = (form.n, _K) if is_k else (_K, form.n)
    right = place(WgmmaDescriptor.decode(b), form.b_major, lines, along // _PER_CHUNK)
    d = layout.byte_offsets(form.d)
    return _Part(
        placed,
        right,
        (int(chunks.ctypes.data), chunks.size),
        (right.plan.address, right.plan.chunks.size),
        (left, row_bytes, column_bytes),
        (_RIGHT, *((_K * _DOUBLE, _DOUBLE) if is_k else (_DOUBLE, form.n * _DOUBLE))),
        int(d.ctypes.data),
        (d, chunks),
    )


def _chunks_in_registers(layout: RegisterLayout, form: WgmmaForm) -> NDArray[np.int64]:
    """Numbers of A's chunks; register 2j + h of A holds chunk j of rows 8h to 8h + 7."""
    a = np.zeros((_ROWS, _K // _PER_CHUNK), np.int64)
    for number, offset in enumerate(layout.byte_offsets(form.a).tolist()):
        half, chunk = number % 2, number // 2
        a[8 * half : 8 * half + 8, chunk] = offset // CHUNK + np.arange(8)
    return a
