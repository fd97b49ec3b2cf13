"""A warp's part of a wgmma in machine code, for the types that it knows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ptxemu import machine_code
from ptxemu.descriptors.matrix_layout import CHUNK, Major
from ptxemu.engines.shared_matrix import address_of_shared, find_chunks
from ptxemu.machine.register_file import RegisterFile, RegisterLayout

if TYPE_CHECKING:
    from ptxemu.descriptors import WgmmaDescriptor
    from ptxemu.engines.wgmma import WgmmaForm
    from ptxemu.machine.operation import AsyncOperation

_TYPES = ("bf16", "f16")
_K, _PER_CHUNK = 16, 8
_ROWS, _ALL_ROWS, _MOST_COLUMNS = 16, 64, 256
_DOUBLE = 8
_left = np.empty(_ALL_ROWS * _K)
_right = np.empty(_MOST_COLUMNS * _K)
_LEFT, _RIGHT = int(_left.ctypes.data), int(_right.ctypes.data)


@dataclass(frozen=True, slots=True)
class WgmmaAddresses:
    """Where a form's registers are in a register file, as arrays that stay.

    Attributes:
        d: address of the offsets of D's registers; a: of the numbers of A's chunks.
    """

    d: int
    a: int
    kept: object


def execute(
    operation: AsyncOperation,
    form: WgmmaForm,
    a: WgmmaDescriptor | None,
    b: WgmmaDescriptor,
    accumulate: bool,
) -> bool:
    """Read A, B and D and write D; False, and nothing done, where machine code is not to do it."""
    warp = operation.issuer
    registers = warp.registers
    if not is_known(form) or not isinstance(registers, RegisterFile):
        return False
    code = machine_code.products()
    if code is None:
        return False
    shared = address_of_shared(warp.cta)
    addresses = addresses_of(registers.layout, form)
    read = code.chunk_reader(form.atype)
    left, row_bytes, column_bytes = _LEFT, _K * _DOUBLE, _DOUBLE
    first = _ROWS * (warp.index % 4)
    if a is None:
        read(registers.address, addresses.a, _ROWS * _K // _PER_CHUNK, _LEFT)
    elif form.a_major is Major.K:
        rows = _part_of_rows(a, first)
        plan, base = find_chunks(operation, warp.cta, rows, Major.K, _ROWS, _K // _PER_CHUNK)
        read(shared + base, plan.address, plan.chunks.size, _LEFT)
    else:
        plan, base = find_chunks(operation, warp.cta, a, Major.MN, _K, _ALL_ROWS // _PER_CHUNK)
        read(shared + base, plan.address, plan.chunks.size, _LEFT)
        left += first * _DOUBLE
        row_bytes, column_bytes = _DOUBLE, _ALL_ROWS * _DOUBLE
    is_k = form.b_major is Major.K
    lines, along = (form.n, _K) if is_k else (_K, form.n)
    plan, base = find_chunks(operation, warp.cta, b, form.b_major, lines, along // _PER_CHUNK)
    code.chunk_reader(form.btype)(shared + base, plan.address, plan.chunks.size, _RIGHT)
    operation.sources_read = True
    code.fragment_product(_K)(
        left,
        row_bytes,
        column_bytes,
        _RIGHT,
        _K * _DOUBLE if is_k else _DOUBLE,
        _DOUBLE if is_k else form.n * _DOUBLE,
        form.n,
        registers.address,
        addresses.d,
        accumulate,
        form.negate_a != form.negate_b,
    )
    return True


def is_known(form: WgmmaForm) -> bool:
    """Whether machine code knows the form's types."""
    return form.dtype == "f32" and form.atype in _TYPES and form.metadata is None


@lru_cache(maxsize=1024)
def addresses_of(layout: RegisterLayout, form: WgmmaForm) -> WgmmaAddresses:
    """Where the form's registers are; register 2j + h of A holds chunk j of rows 8h to 8h + 7."""
    d = layout.byte_offsets(form.d)
    a = np.zeros((_ROWS, _K // _PER_CHUNK), np.int64)
    for number, offset in enumerate(layout.byte_offsets(form.a).tolist()):
        half, chunk = number % 2, number // 2
        a[8 * half : 8 * half + 8, chunk] = offset // CHUNK + np.arange(8)
    return WgmmaAddresses(int(d.ctypes.data), int(a.ctypes.data), (d, a))


@lru_cache(maxsize=4096)
def _part_of_rows(a: WgmmaDescriptor, first: int) -> WgmmaDescriptor:
    """The descriptor of the 16 rows of A from `first` on."""
    offset = first // 8 * a.stride_dimension_byte_offset
    return replace(a, start_address=a.start_address + offset)
