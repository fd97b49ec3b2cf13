"""The wgmmas of a row block: S = Q K^T and dP = dO V^T, V being K's first columns.

Chunks of Q and K are [64 rows][64 columns] with the 128-byte swizzle, columns along K of the
product. dO comes from registers.
"""

from typing import Any

from flashdsa.dsl.wgmma import descriptor_behind, mma_async
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import (
    BF16,
    CHUNK,
    CHUNK_BYTES,
    V_CHUNKS,
)
from flashdsa.kernels.attention.sm90.core.tile import TILE_KEYS

MMA_K = 16
STEPS = CHUNK // MMA_K
"""wgmmas of a chunk."""
OPCODE = f"wgmma.mma_async.sync.aligned.m64n{TILE_KEYS}k16.f32.bf16.bf16"
OF_TILE = TILE_KEYS // 2
"""fp32 of S, and of dP, in a thread."""
A_WORDS = 4
"""Words of A in a thread, two bf16 each, of one wgmma."""


def multiply_chunk(s: Any, dp: Any, q: Any, do: Any, k: Any, chunk: int) -> None:
    """Issue S += Q K^T and dP += dO V^T over the columns of a chunk; the first one clears both.

    Args:
        q: low word of Q's first chunk. do: this thread's words of dO. k: low word of the chunk.
    """
    for step in range(STEPS):
        offset = step * MMA_K * BF16
        b = descriptor_behind(k, offset)
        a = descriptor_behind(q, chunk * CHUNK_BYTES + offset)
        _multiply(s, a, b, (chunk, step) != (0, 0), (0, 0))
        if chunk < V_CHUNKS:
            first = A_WORDS * (chunk * STEPS + step)
            a = [do[first + i] for i in range(A_WORDS)]
            _multiply(dp, a, b, (chunk, step) != (0, 0), (0,))


def _multiply(d: Any, a: Any, b: Any, accumulate: bool, transposes: tuple[int, ...]) -> None:
    values = mma_async(
        OPCODE, [d[i] for i in range(OF_TILE)], a, b, accumulate=accumulate, transposes=transposes
    )
    for i in range(OF_TILE):
        d[i] = values[i]
