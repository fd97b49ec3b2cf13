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
from flashdsa.kernels.attention.sm90.core.tile import BF16, CHUNK, Q_CHUNK_BYTES, ROWS, Tile
from flashdsa.plan.row_tiles import ROW_BYTES


def multiply_scores(
    tile: Tile, s: Any, q: Any, k: Any, slice_: int, clear: bool, kind: str = BF16_KIND
) -> None:
    """Issue S += Q K^T over the columns of a slice; with `clear` S = Q K^T. `kind`: of Q and K."""
    warpgroup.fence()
    q, k = opaque(q), opaque(k)
    for chunk in tile.chunks_of(slice_):
        for step in range(CHUNK // MMA_K):
            column = step * MMA_K * BF16
            accumulate = not clear or (chunk, step) != (tile.chunks_of(slice_)[0], 0)
            a = descriptor_behind(q, chunk * Q_CHUNK_BYTES + column)
            b = descriptor_behind(k, chunk * tile.chunk_bytes + column)
            _multiply(tile.keys, kind, s, a, b, accumulate, (0, 0))


def multiply_own(
    tile: Tile, out: Any, p: Any, v: Any, kind: str = BF16_KIND, adds: Any = True
) -> None:
    """Issue O += P V as one group; P from this thread's registers. `adds`: else O = P V."""
    warpgroup.fence()
    v = opaque(v)
    for step in range(tile.keys // MMA_K):
        a = [p[4 * step + i] for i in range(4)]
        b = descriptor_behind(v, step * MMA_K * ROW_BYTES)
        _multiply(tile.half_dims, kind, out, a, b, True if step else adds, (1,))
    warpgroup.commit_group()


def multiply_others(
    tile: Tile, out: Any, p: Any, v: Any, kind: str = BF16_KIND, adds: Any = True
) -> None:
    """Issue O += P V as one group; P from shared memory. `adds`: else O = P V."""
    warpgroup.fence()
    p, v = opaque(p), opaque(v)
    for step in range(tile.keys // MMA_K):
        a = descriptor_behind(p, step * MMA_K * BF16)
        b = descriptor_behind(v, step * MMA_K * ROW_BYTES)
        _multiply(tile.half_dims, kind, out, a, b, True if step else adds, (0, 1))
    warpgroup.commit_group()


def _multiply(
    columns: int, kind: str, d: Any, a: Any, b: Any, accumulate: Any, transposes: tuple[int, ...]
) -> None:
    count = columns // 2
    values = mma_async(
        f"wgmma.mma_async.sync.aligned.m{ROWS}n{columns}k{MMA_K}.f32.{kind}.{kind}",
        [d[i] for i in range(count)],
        a,
        b,
        accumulate=accumulate,
        transposes=transposes,
    )
    for i in range(count):
        d[i] = values[i]
