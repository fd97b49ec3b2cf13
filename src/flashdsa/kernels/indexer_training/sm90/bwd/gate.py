"""The gate: q k to its gradient. A = g w where q k is positive, and 0 elsewhere."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.smem import shared_pointer
from flashdsa.dsl.swizzle import swizzled_128
from flashdsa.dsl.warp_matrix import pack_bf16
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer_training.sm90.bwd.plan import FP32, TILE_KEYS

MMA_ROWS = 16
"""Rows of a product in a warp."""
THREAD_ROWS = 2
"""Rows of a thread, 8 apart."""
PAIR = 2
"""Neighbouring keys of a thread in each eight."""
PIECE_KEYS = 16


@cute.jit
def gate(
    acc: cute.Tensor,
    weights: list[Float32],
    sums: cute.Tensor,
    image: Int32,
    gradients: Int32,
    thread: Int32,
    block: cutlass.Constexpr,
) -> None:
    """Write A of a block to its image, and add sum g relu(q k) to this thread's sums.

    Args:
        acc: q k of the block's rows and the tile's keys.
        weights, sums: of this thread's rows of each own block. image: address.
        gradients: address of those of this warp's query. block: which of the own ones it is.
    """
    lane = thread % WARP_SIZE
    row = thread // WARP_SIZE * MMA_ROWS + lane % MMA_ROWS
    mine = gradients + lane % 4 * (PAIR * FP32)
    for piece in cutlass.range_constexpr(TILE_KEYS // PIECE_KEYS):
        words = []
        for eight in cutlass.range_constexpr(2 * piece, 2 * piece + 2):
            g = prims.load_ext(shared_pointer(mine + eight * 8 * FP32), dtype=Float32, count=PAIR)
            for h in cutlass.range_constexpr(THREAD_ROWS):
                of_row = THREAD_ROWS * block + h
                values = []
                for i in cutlass.range_constexpr(PAIR):
                    product = acc[4 * eight + 2 * h + i]
                    # The gate is shut at 0, and for NaN.
                    open_gate = g[i] if product > 0.0 else Float32(0.0)
                    sums[of_row] = sums[of_row] + open_gate * product
                    values.append(open_gate * weights[of_row])
                words.append(pack_bf16(*values))
        unit = 2 * piece + lane // MMA_ROWS
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[image + swizzled_128(row, unit), *words],
        )


def clear(acc: Any, count: int) -> None:
    """Zeros."""
    for i in range(count):
        acc[i] = Float32(0.0)
