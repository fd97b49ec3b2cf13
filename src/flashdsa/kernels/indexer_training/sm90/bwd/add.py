"""Addition of 64 dims of a tile's dK from a warpgroup's accumulators to device memory.

Lane j of a row's four has columns 2 j and 2 j + 1 of each eight in an accumulator. Two neighbouring
lanes exchange, so that each has four neighbouring dims; then the lanes of two neighbouring rows, so
that all eight have 128 bytes of one row, and then of the other.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.gmem import add4_if, store4_if
from flashdsa.dsl.smem import shared_pointer
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer_training.sm90.bwd.gate import MMA_ROWS, THREAD_ROWS
from flashdsa.kernels.indexer_training.sm90.bwd.plan import CHUNK, FP32
from flashdsa.problem import INDEX_HEAD_DIM

LINE_DIMS = 32
"""128 bytes of dK."""
NEIGHBOUR, NEXT_ROW = 1, 4
"""Distances of lanes."""


@cute.jit
def four_neighbours(acc: cute.Tensor, pair: cutlass.Constexpr, h: cutlass.Constexpr) -> list[Any]:
    """The lane's 4 of 16 columns; even lanes own the first 8."""
    odd = cute.arch.lane_idx() % 2 == 1
    first, second = 8 * pair + 2 * h, 8 * pair + 4 + 2 * h
    got, kept = [], []
    for i in cutlass.range_constexpr(2):
        sent = acc[first + i] if odd else acc[second + i]
        got.append(cute.arch.shuffle_sync_bfly(sent, NEIGHBOUR))
        kept.append(acc[second + i] if odd else acc[first + i])
    left = [got[i] if odd else kept[i] for i in range(2)]
    right = [kept[i] if odd else got[i] for i in range(2)]
    return left + right


@cute.jit
def add_dims(
    to: cute.Pointer,
    acc: cute.Tensor,
    keys: Int32,
    thread: Int32,
    ordered: cutlass.Constexpr,
) -> None:
    """Add the accumulators to rows of dK; a negative key has no row.

    Args:
        to: first of the 64 dims in row 0 of dK; ordered: in the row of the tile's first key.
        keys: address of the tile's numbers.
        ordered: the list's own rows are written, and nothing is added.
    """
    lane = thread % WARP_SIZE
    is_next = lane // NEXT_ROW % 2 == 1
    dim = lane // NEXT_ROW % 2 * (LINE_DIMS // 2) + lane % 2 * 8 + lane % 4 // 2 * 4
    # The pair of rows that this lane shares: first the even one, then the odd one.
    even = thread // WARP_SIZE * MMA_ROWS + lane // (2 * NEXT_ROW) * 2
    for h in cutlass.range_constexpr(THREAD_ROWS):
        place = even + 8 * h
        of_pair = prims.load_ext(shared_pointer(keys + place * FP32), dtype=Int32, count=2)
        for line in cutlass.range_constexpr(CHUNK // LINE_DIMS):
            left = four_neighbours(acc, 2 * line, h)
            right = four_neighbours(acc, 2 * line + 1, h)
            got = [
                cute.arch.shuffle_sync_bfly(left[i] if is_next else right[i], NEXT_ROW)
                for i in range(4)
            ]
            of_even = [got[i] if is_next else left[i] for i in range(4)]
            of_odd = [right[i] if is_next else got[i] for i in range(4)]
            for values, other in ((of_even, 0), (of_odd, 1)):
                key = of_pair[other]
                at = to + (line * LINE_DIMS + dim)
                if cutlass.const_expr(ordered):
                    store4_if(key, at + Int64(place + other) * INDEX_HEAD_DIM, values)
                else:
                    add4_if(key, at + Int64(key) * INDEX_HEAD_DIM, values)
