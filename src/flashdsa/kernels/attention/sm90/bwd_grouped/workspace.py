"""Data between the kernels of the grouped backward: rows, lists of keys, and the workspace.

**Rows.** Row r = query * H + head of Q, dO, dQ, seen as (S * H, dims). A row block is 64
neighbouring rows. A group is ROW_BLOCKS neighbouring row blocks, so `group_queries` neighbouring
queries; group g has the row blocks from g * ROW_BLOCKS on. Rows past the last query count as zeros
and are not written.

**Lists.** Each group has one of `attention/lists.py`, in whole tiles. Here its rows are ids.

**Workspace.** Each row block and tile of 64 keys has a matrix of P and one of dS, in bf16. A matrix
is [key][row] in 128-byte rows with the 128-byte swizzle, as wgmma reads it, so a plain bulk copy
brings it: element (key, row) is at swizzled_128(key, row // 8) + row % 8 * 2. dS has sm_scale in
it: dQ = dS K and dK = dS^T Q. Both are exact zeros if a query does not name a key.

The workspace is (row blocks, bytes of one) uint8, and has room for that many tiles of each list;
longer lists must not be handed to these kernels. They work on the groups of [group_begin,
group_end). The workspace's first row block is the first one of group_begin, so that parts of the
queries use the same workspace one after another; lists, Q, dO and dQ are whole.
"""

from typing import Any

from flashdsa.kernels.attention.sm90.core.tile import ROWS, Tile

P_MATRIX, DS_MATRIX = 0, 1
MATRICES = 2
"""Matrices of a row block and a tile: P and then dS."""
ROW_BLOCKS = 4
"""Row blocks of a group."""


def group_queries(heads: int) -> int:
    """Neighbouring queries of a group."""
    return ROW_BLOCKS * ROWS // heads


def matrix_offset(tile: Tile, block: Any, number: Any, block_bytes: Any, matrix: int) -> Any:
    """Bytes from the workspace's first to a matrix's first one. `block`: row block, counted from
    the first one of group_begin; 64 bits where it is a run-time value, and so is the result.
    `number`: tile of the group's list. `block_bytes`: of a row block. `matrix`: P_MATRIX or
    DS_MATRIX."""
    return block * block_bytes + (number * MATRICES + matrix) * tile.p_bytes


def block_bytes(tile: Tile, keys: int) -> int:
    """Bytes of a row block, for lists of `keys` keys."""
    return -(-keys // tile.keys) * MATRICES * tile.p_bytes
