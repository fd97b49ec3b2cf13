"""Data between the kernels of the grouped backward: rows, lists of keys, and the workspace.

**Rows.** Row r = query * H + head of Q, dO, dQ, seen as (S * H, dims). A row block is 64
neighbouring rows. A group is ROW_BLOCKS neighbouring row blocks, so `group_queries` neighbouring
queries; group g has the row blocks from g * ROW_BLOCKS on. Rows past the last query count as zeros
and are not written.

**Lists.** Each group has one list of kv rows, the union of what its queries name:
    ids      (groups, capacity) int32; capacity is a multiple of 64. The first counts[g] are the
             list: 0 <= id < S_kv. The rest, up to the next multiple of 64, are copies of ids of
             the list, of which every P and dS is 0; ids after it must not be read.
    members  (groups, capacity) uint8, or uint16 where a group has 16 queries: bit i says that query
             i of the group names the key. 0 after the list's end.
    counts   (groups,) int32; with 0 there is no tile: dQ of the group's rows is 0.
    present  (groups,) int32: bit i says that query i of the group names any key. Q and dO of one
             that does not, or that is past the last query, may hold anything, NaN too. Products
             over rows take them for zeros. Bits UNORDERED_SHIFT and up: how many of the list's last
             ids may be less than or equal to one before, all where it is MOST_UNORDERED. The others
             ascend.

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
    """Bytes from the workspace's first to a matrix's first one.

    Args:
        block: row block, counted from the first one of group_begin; 64 bits where it is a run-time
            value, and so is the result. number: tile of the group's list. block_bytes: of a row
            block. matrix: P_MATRIX or DS_MATRIX.
    """
    return block * block_bytes + (number * MATRICES + matrix) * tile.p_bytes


def block_bytes(tile: Tile, keys: int) -> int:
    """Bytes of a row block, for lists of `keys` keys."""
    return -(-keys // tile.keys) * MATRICES * tile.p_bytes
