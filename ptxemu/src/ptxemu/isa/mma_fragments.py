"""Layout of the matrices of mma in the lanes of a warp (PTX ISA, "Matrix Fragments for mma").

All shapes m8n8 and m16n8 but one hold their fragments alike, in words of 32 bits (of f64 in words
of 64). Lane l, with g = l / 4 and t = l % 4: word r of A is row g + 8(r % h), word t + 4(r / h) of
that row, h being 1 for 8 rows and 2 for 16; word r of B is column g, word t + 4r; element i of C
and D is row g + 8(i / 2), column 2t + i % 2.

m8n8k4 of f16 is four products, each of two groups of four lanes, with a layout of its own.
"""

from __future__ import annotations

import numpy as np

from ptxemu.machine.lanes import LANE_IDS, WARP_SIZE
from ptxemu.numerics.dtypes import F2, F4, U1, U2, U4, Array

COLUMNS = 8


def rows_of_a(words: Array, rows: int) -> Array:
    """Bytes (rows, of k) of A from its registers (count, 32)."""
    parts = words.reshape(-1, rows // 8, 8, 4).transpose(1, 2, 0, 3)
    return np.ascontiguousarray(parts).reshape(rows, -1).view(U1)


def columns_of_b(words: Array) -> Array:
    """Bytes (8 columns, of k) of B from its registers (count, 32)."""
    parts = words.reshape(-1, 8, 4).transpose(1, 0, 2)
    return np.ascontiguousarray(parts).reshape(COLUMNS, -1).view(U1)


def cells_of(registers: Array, rows: int, type_: str) -> Array:
    """C (rows, 8) from its registers: 32-bit cells (f16 in the low half), or of f64 its bits."""
    if type_ == "f16":
        return registers.view(U2).reshape(rows, COLUMNS).astype(U4)
    parts = registers.reshape(rows // 8, 2, 8, 4).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(parts).reshape(rows, COLUMNS)


def registers_of(cells: Array, type_: str) -> Array:
    """The reverse of `cells_of`: (registers, 32)."""
    rows = cells.shape[0]
    if type_ == "f16":
        packed = np.ascontiguousarray(cells.astype(U2)).reshape(rows // 8, WARP_SIZE, 2)
        return packed.view(U4).reshape(rows // 8, WARP_SIZE)
    parts = cells.reshape(rows // 8, 8, 4, 2).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(parts).reshape(rows // 4, WARP_SIZE)


_QUAD = LANE_IDS.astype(np.intp) // 4 % 4
"""Number of the product of m8n8k4, of four, that each lane takes part in."""
_LINE = LANE_IDS.astype(np.intp) % 4
_SECOND = LANE_IDS.astype(np.intp) // 16
"""1 for the lanes that hold the second half of an operand."""
_FOUR, _EIGHT = np.arange(4)[None, :], np.arange(8)[None, :]


def quad_operand(registers: Array, *, k_major: bool) -> Array:
    """A (4 products, 8 rows, 4) or B (4 products, 8 columns, 4) of m8n8k4 from two registers.

    Args:
        k_major: whether a lane holds four elements along k: A .row or B .col.
    """
    values = np.ascontiguousarray(registers.T).view(F2)
    found = np.zeros((4, 8, 4), F2)
    quad, line, second = _QUAD[:, None], _LINE[:, None], _SECOND[:, None]
    if k_major:
        found[quad, line + 4 * second, _FOUR] = values
    else:
        found[quad, _FOUR + 4 * second, line] = values
    return found


def _places_of_c(type_: str) -> tuple[Array, Array]:
    """Row and column of the 8 elements of C that each lane holds."""
    line, second = _LINE[:, None], _SECOND[:, None]
    if type_ == "f16":
        return line + 4 * second, np.broadcast_to(_EIGHT, (WARP_SIZE, 8))
    rows = (line & 1) + (_EIGHT & 2) + 4 * second
    return rows, (_EIGHT & 4) + (line & 2) + (_EIGHT & 1)


def quad_cells(registers: Array, type_: str) -> Array:
    """C of m8n8k4, (4 products, 8, 8), as numbers."""
    values = np.ascontiguousarray(registers.T).view(F2 if type_ == "f16" else F4)
    found = np.zeros((4, 8, 8), values.dtype)
    rows, columns = _places_of_c(type_)
    found[_QUAD[:, None], rows, columns] = values
    return found


def quad_registers(cells: Array, type_: str) -> Array:
    """D's registers (count, 32) from the numbers (4, 8, 8)."""
    rows, columns = _places_of_c(type_)
    values = np.ascontiguousarray(cells[_QUAD[:, None], rows, columns])
    return np.ascontiguousarray(values.view(U4).T)
