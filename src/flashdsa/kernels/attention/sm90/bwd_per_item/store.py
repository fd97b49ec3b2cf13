"""dQ of 64 rows from a warpgroup's accumulators to device memory."""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.fragments import BLOCK_DIMS, MMA_ROWS, THREAD_ROWS, pack
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.core.backward import PAIR_DIMS
from flashdsa.kernels.attention.sm90.core.tile import D_QK, ROWS


@cute.jit
def store_dq(
    dq: cute.Tensor,
    acc: Any,
    item: Int32,
    thread: Int32,
    first_dim: cutlass.Constexpr,
    columns: cutlass.Constexpr,
) -> None:
    """Store columns of dQ in bf16, 16 bytes a lane. Rows past the last one are not written.

    A lane has four neighbouring dims of each 16, see `columns.py`. Two lanes exchange, so that one
    has eight of the first 16, and the other eight of the next.

    Args:
        dq: (S * H, 576) bf16. acc: this thread's columns / 2 fp32. thread: in its warpgroup.
    """
    lane = thread % WARP_SIZE
    odd = lane % 2 == 1
    dim = lane % 2 * PAIR_DIMS + lane % 4 // 2 * 8
    first = Int64(item) * ROWS + (thread // WARP_SIZE * MMA_ROWS + lane // 4)
    for h in cutlass.range_constexpr(THREAD_ROWS):
        row = first + 8 * h
        at = dq.iterator + (row * D_QK + dim)
        present = row < dq.shape[0]
        for block in cutlass.range_constexpr(columns // BLOCK_DIMS):
            values = [acc[16 * block + 2 * h + 4 * i + e] for i in range(4) for e in range(2)]
            left, right = (
                [pack(values[4 * p + 2 * i], values[4 * p + 2 * i + 1]) for i in range(2)]
                for p in range(2)
            )
            got = [cute.arch.shuffle_sync_bfly(left[i] if odd else right[i], 1) for i in range(2)]
            words = [got[i] if odd else left[i] for i in range(2)]
            words += [right[i] if odd else got[i] for i in range(2)]
            if present:
                cute.arch.inline_ptx(
                    "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[at + (first_dim + block * BLOCK_DIMS), *words],
                )
