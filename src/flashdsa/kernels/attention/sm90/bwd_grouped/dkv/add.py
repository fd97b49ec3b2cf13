"""A tile's dKV from a warpgroup's accumulators to device memory, 16 bytes by each addition."""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.gmem import add4_if
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import SLICE_DIMS
from flashdsa.kernels.attention.sm90.core.backward import PAIR_DIMS, four_dims
from flashdsa.kernels.attention.sm90.core.tile import D_QK

KEYS = 2
"""Rows of the tile in a thread, 8 apart."""
LINE_DIMS = 2 * PAIR_DIMS
"""Dims of a line: 128 bytes of dKV, which eight lanes add in one piece; pieces of 64 bytes take the
kernel 9 % longer."""


@cute.jit
def add_tile(dkv: Any, acc: Any, keys: list[Int32]) -> None:
    """Add this thread's accumulators to dKV of the rows `keys`; a negative key has no row.

    Args:
        dkv: pointer to the first row's first dim of the slice.

    The four lanes of a row have 64 bytes of two lines each time. They exchange with the four lanes
    of the next row, so that all eight have 128 bytes of one row, and then of the other.
    """
    lane = cute.arch.lane_idx()
    is_next = lane // 4 % 2 == 1
    dim = lane // 4 % 2 * PAIR_DIMS + lane % 4 * 4
    for h in cutlass.range_constexpr(KEYS):
        others = cute.arch.shuffle_sync_bfly(keys[h], 4)
        key, next_key = (others if is_next else keys[h]), (keys[h] if is_next else others)
        row = dkv + (Int64(key) * D_QK + dim)
        next_row = dkv + (Int64(next_key) * D_QK + dim)
        for line in cutlass.range_constexpr(SLICE_DIMS // LINE_DIMS):
            left = four_dims(acc, 2 * line, h)
            right = four_dims(acc, 2 * line + 1, h)
            got = [
                cute.arch.shuffle_sync_bfly(left[i] if is_next else right[i], 4) for i in range(4)
            ]
            of_row = [got[i] if is_next else left[i] for i in range(4)]
            of_next = [right[i] if is_next else got[i] for i in range(4)]
            add4_if(key, row + line * LINE_DIMS, of_row)
            add4_if(next_key, next_row + line * LINE_DIMS, of_next)


@cute.jit
def add_row_by_row(dkv: Any, acc: Any, keys: list[Int32]) -> None:
    """Same as `add_tile`, a row after the other: several may be of the same key."""
    lane = cute.arch.lane_idx()
    for h in cutlass.range_constexpr(KEYS):
        row = dkv + (Int64(keys[h]) * D_QK + lane % 4 * 4)
        for quad in cutlass.range(WARP_SIZE // 4, unroll=1):
            # The others' additions, which are to other rows or come later.
            key = keys[h] if lane // 4 == quad else Int32(-1)
            for pair in cutlass.range_constexpr(SLICE_DIMS // PAIR_DIMS):
                add4_if(key, row + pair * PAIR_DIMS, four_dims(acc, pair, h))
            cute.arch.sync_warp()
