"""A tile's dKV from a warpgroup's accumulators to device memory, 16 bytes by each addition."""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.kernels.sparse_mla.sm90.bwd.dkv.plan import SLICE_DIMS
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import D_QK

KEYS = 2
"""Rows of the tile in a thread, 8 apart."""
PAIR_COLUMNS = 16
"""Of two neighbouring groups of 8 columns, in each of which a thread has two."""


@cute.jit
def add_tile(dkv: cute.Tensor, acc: Any, keys: list[Int32], first_dim: Int32) -> None:
    """dKV of the rows `keys` += this thread's accumulators; a negative key has no row.

    Neighbouring lanes exchange, so that one has four columns of the first group and the other one
    four of the second: the four lanes of a row add 64 bytes in one piece.
    """
    quad = cute.arch.lane_idx() % 4
    odd = quad % 2 == 1
    column = first_dim + quad % 2 * (PAIR_COLUMNS // 2) + quad // 2 * 4
    for h in cutlass.range_constexpr(KEYS):
        at = dkv.iterator + (Int64(keys[h]) * D_QK + column)
        for pair in cutlass.range_constexpr(SLICE_DIMS // PAIR_COLUMNS):
            first = [acc[8 * pair + 2 * h + e] for e in range(2)]
            second = [acc[8 * pair + 4 + 2 * h + e] for e in range(2)]
            got = [cute.arch.shuffle_sync_bfly(first[e] if odd else second[e], 1) for e in range(2)]
            low = [got[e] if odd else first[e] for e in range(2)]
            high = [second[e] if odd else got[e] for e in range(2)]
            add_four(at + pair * PAIR_COLUMNS, [*low, *high], keys[h])


def add_four(pointer: Any, values: list[Any], key: Any) -> None:
    """Four neighbouring fp32, unless the key is negative."""
    cute.arch.inline_ptx(
        "{ .reg .pred some; setp.ge.s32 some, {$r5}, 0; "
        "@some red.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}; }",
        read_only_args=[pointer, *values, key],
    )
