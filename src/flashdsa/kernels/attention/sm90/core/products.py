"""The wgmmas of both consumers: S = Q K^T and O += P V.

Every operand is made of chunks [64 rows][64 columns] with the 128-byte swizzle. A row's columns are
along K of the product where it is a row of Q, K or P. V's columns are along N, and the keys along
K.
"""

from typing import Any

from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.fragments import BF16_KIND, MMA_K
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.wgmma import descriptor_behind, mma_async
from flashdsa.kernels.attention.sm90.core.tile import (
    BF16,
    CHUNK,
    CHUNK_BYTES,
    CHUNKS,
    HALF_DIMS,
    PIECE_CHUNKS,
    TILE_KEYS,
)

SCORES = f"wgmma.mma_async.sync.aligned.m64n{TILE_KEYS}k16.f32"
VALUES = f"wgmma.mma_async.sync.aligned.m64n{HALF_DIMS}k16.f32"
OF_SCORES = TILE_KEYS // 2
"""fp32 of S in a thread."""
OF_OUT = HALF_DIMS // 2
"""fp32 of a consumer's O in a thread."""
P_WORDS = OF_SCORES // 2
"""Words of P in a thread, two bf16 each."""


def multiply_scores(s: Any, q: Any, k: Any, piece: int, clear: bool, kind: str = BF16_KIND) -> None:
    """Issue S += Q K^T over the columns of a piece; with `clear` S = Q K^T. `kind`: of Q and K."""
    warpgroup.fence()
    q, k = opaque(q), opaque(k)
    for chunk in range(piece * PIECE_CHUNKS, min((piece + 1) * PIECE_CHUNKS, CHUNKS)):
        for step in range(CHUNK // MMA_K):
            offset = chunk * CHUNK_BYTES + step * MMA_K * BF16
            accumulate = not clear or (chunk, step) != (piece * PIECE_CHUNKS, 0)
            a, b = descriptor_behind(q, offset), descriptor_behind(k, offset)
            _multiply(SCORES, kind, s, a, b, accumulate, (0, 0))


def multiply_own(out: Any, p: Any, v: Any, kind: str = BF16_KIND) -> None:
    """Issue O += P V as one group; P from this thread's registers."""
    warpgroup.fence()
    v = opaque(v)
    for step in range(TILE_KEYS // MMA_K):
        a = [p[4 * step + i] for i in range(4)]
        b = descriptor_behind(v, step * MMA_K * CHUNK * BF16)
        _multiply(VALUES, kind, out, a, b, True, (1,))
    warpgroup.commit_group()


def multiply_others(out: Any, p: Any, v: Any, kind: str = BF16_KIND) -> None:
    """Issue O += P V as one group; P from shared memory."""
    warpgroup.fence()
    p, v = opaque(p), opaque(v)
    for step in range(TILE_KEYS // MMA_K):
        a = descriptor_behind(p, step * MMA_K * BF16)
        b = descriptor_behind(v, step * MMA_K * CHUNK * BF16)
        _multiply(VALUES, kind, out, a, b, True, (0, 1))
    warpgroup.commit_group()


def _multiply(
    shape: str, kind: str, d: Any, a: Any, b: Any, accumulate: bool, transposes: tuple[int, ...]
) -> None:
    count = OF_OUT if shape is VALUES else OF_SCORES
    values = mma_async(
        f"{shape}.{kind}.{kind}",
        [d[i] for i in range(count)],
        a,
        b,
        accumulate=accumulate,
        transposes=transposes,
    )
    for i in range(count):
        d[i] = values[i]
