"""A query's Q in shared memory; its columns have the order of the keys' columns in a thread.

A thread reads 16 neighbouring bytes of a row of the keys, eight columns, where A of a wgmma has two
pairs of columns of it, and two of the next wgmma. So the eight columns 32 i + 8 c .. of Q, c the
lane in its quad, go to where wgmma 2 i takes columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9, and wgmma 2
i + 1 the same of its own.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.smem import shared_pointer
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.indexer_training.sm90.scores.plan import BF16
from flashdsa.plan.row_tiles import ROW_BYTES
from flashdsa.problem import INDEX_HEAD_DIM

UNIT_BYTES = 16
UNITS = INDEX_HEAD_DIM * BF16 // UNIT_BYTES
"""16-byte pieces of a row."""
QUAD = 4
"""Lanes that share rows of a product."""


def load_unit(pointer: Any) -> Any:
    """16 bytes of device memory as four words; the second-level cache gets 128.

    NOTE: not `.nc`, which ptxas moves over barriers.
    """
    return cute.arch.inline_ptx(
        "ld.global.L2::128B.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[pointer],
    )


@cute.jit
def store_query(
    q: cute.Tensor, query: Int32, to: Int32, thread: Int32, num_heads: cutlass.Constexpr
) -> None:
    """All threads: copy this one's part of Q; heads past the last become zeros.

    Args:
        q: (S, H, 128) bf16, H at most num_heads. to: shared memory address.
    """
    heads = Int32(q.shape[1])
    first = q.iterator + Int64(query) * heads * INDEX_HEAD_DIM
    for number in cutlass.range_constexpr(num_heads * UNITS // WARPGROUP_SIZE):
        unit = thread + number * WARPGROUP_SIZE
        head, in_row = unit // UNITS, unit % UNITS
        words = (Int32(0), Int32(0), Int32(0), Int32(0))
        if head < heads:
            words = load_unit(first + unit * (UNIT_BYTES // BF16))
        eight, lane = in_row // QUAD, in_row % QUAD
        chunk = to + eight // 2 * (num_heads * ROW_BYTES) + lane * 4
        for pair in cutlass.range_constexpr(4):
            place = eight % 2 * 4 + pair
            prims.store_ext(words[pair], shared_pointer(chunk + swizzled_128(head, place)))
