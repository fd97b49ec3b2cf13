"""The wgmmas of a row block: S = Q K^T and dP = dO V^T, V being K's first columns.

Chunks of Q and K are [64 rows][64 columns] with the 128-byte swizzle, columns along K of the
product. dO comes from registers.
"""

from typing import Any

from cutlass import Int32, Int64, Uint32

from flashdsa.dsl.wgmma import matrix_descriptor, mma_async
from flashdsa.kernels.sparse_mla.sm90.bwd.scores.plan import (
    BF16,
    CHUNK,
    CHUNK_BYTES,
    V_CHUNKS,
)
from flashdsa.kernels.sparse_mla.sm90.bwd.spool import TILE_KEYS

MMA_K = 16
STEPS = CHUNK // MMA_K
"""wgmmas of a chunk."""
ATOM_BYTES = 1024
"""Eight rows of 128 bytes: the stride between a chunk's swizzle atoms."""
OPCODE = f"wgmma.mma_async.sync.aligned.m64n{TILE_KEYS}k16.f32.bf16.bf16"
OF_TILE = TILE_KEYS // 2
"""fp32 of S, and of dP, in a thread."""
A_WORDS = 4
"""Words of A in a thread, two bf16 each, of one wgmma."""


def low_word(address: Any) -> Any:
    """Low word of the descriptor of a chunk at a shared memory address."""
    return Int32(matrix_descriptor(address, 16, ATOM_BYTES, "SW128"))


def descriptor(low: Any, offset: int) -> Any:
    """The descriptor `offset` bytes behind that of `low`. Only low words differ."""
    high = (ATOM_BYTES >> 4 | 1 << 30) << 32
    return Int64(Uint32(low + Int32(offset >> 4))) | Int64(high)


def multiply_chunk(s: Any, dp: Any, q: Any, do: Any, k: Any, chunk: int) -> None:
    """S += Q K^T and dP += dO V^T over the columns of a chunk; the first one clears both.

    Args:
        q: low word of Q's first chunk. do: this thread's words of dO. k: low word of the chunk.
    """
    for step in range(STEPS):
        offset = step * MMA_K * BF16
        b = descriptor(k, offset)
        _multiply(
            s, descriptor(q, chunk * CHUNK_BYTES + offset), b, (chunk, step) != (0, 0), (0, 0)
        )
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
