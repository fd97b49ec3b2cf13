"""Data between the kernels of the backward: rows, lists of keys, and the spool.

**Rows.** Row r = query * H + head of Q, dO, dQ, seen as (S * H, dims). A row block is ROWS
neighbouring rows. A group is `row_blocks` (2 or 4) neighbouring row blocks, so `group_queries`
neighbouring queries; group g has the row blocks from g * row_blocks on. Rows past the last query
count as zeros and are not written.

**Lists.** Each group has one list of kv rows, the union of what its queries name:
    ids      (groups, capacity) int32; capacity is a multiple of TILE_KEYS. The first counts[g] are
             the list: 0 <= id < S_kv. The rest, up to the next multiple of TILE_KEYS, are copies
             of ids of the list, of which every P and dS is 0; ids after it must not be read.
    members  (groups, capacity) uint8, or uint16 where a group has 16 queries: bit i says that query
             i of the group names the key. 0 after the list's end.
    counts   (groups,) int32; with 0 there is no tile: dQ of the group's rows is 0.
    present  (groups,) int32: bit i says that query i of the group names any key. Q and dO of one
             that does not, or that is past the last query, may hold anything, NaN too. Products
             over rows take them for zeros. Bits UNORDERED_SHIFT and up: how many of the list's last
             ids may be less than or equal to one before, all where it is MOST_UNORDERED. The others
             ascend.

**Spool.** For each row block and tile of TILE_KEYS keys an image of P and one of dS, in bf16. An
image is a K-major tile [key][row] of 128-byte rows in the 128-byte swizzle, as wgmma reads it, so a
plain bulk copy brings it: element (key, row) is at swizzled_128(key, row // 8) + row % 8 * 2. dS
has sm_scale in it: dQ = dS K and dK = dS^T Q. Both are exact zeros if a query does not name a key.

The spool is (row blocks, bytes of one) uint8, and has room for that many tiles of each list; longer
lists must not be handed to these kernels. They work on the groups of [group_begin, group_end). The
spool's first row block is the first one of group_begin, so that parts of the queries use the same
spool one after another; lists, Q, dO and dQ are whole.
"""

from typing import Any

from flashdsa.kernels.attention.sm90.core.tile import ROWS, TILE_KEYS

IMAGE_BYTES = TILE_KEYS * ROWS * 2
P_IMAGE, DS_IMAGE = 0, 1
IMAGES = 2
"""Images of a row block's tile: P and then dS."""
ROW_BLOCKS = (2, 4)
"""Row blocks of a group."""


def group_queries(heads: int, row_blocks: int) -> int:
    """Neighbouring queries of a group."""
    return row_blocks * ROWS // heads


def image_offset(block: Any, tile: Any, block_bytes: Any, image: int) -> Any:
    """Bytes from the spool's first to an image's first one.

    Args:
        block: row block, counted from the first one of group_begin; 64 bits where it is a run-time
            value, and so is the result. tile: of the group's list. block_bytes: of a row block.
        image: P_IMAGE or DS_IMAGE.
    """
    return block * block_bytes + (tile * IMAGES + image) * IMAGE_BYTES


def block_bytes(keys: int) -> int:
    """Bytes of a row block, for lists of `keys` keys."""
    return -(-keys // TILE_KEYS) * IMAGES * IMAGE_BYTES
