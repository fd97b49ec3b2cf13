"""The wgmmas of a tile: q k, dQ and dK. All operands are tiles of 128-byte lines, swizzled."""

from typing import Any

from cutlass.cute.nvgpu import warpgroup

from flashdsa.dsl.fragments import MMA_K
from flashdsa.dsl.opaque import opaque
from flashdsa.dsl.wgmma import along_k, along_n, descriptor_behind, mma_async
from flashdsa.kernels.indexer_training.sm90.bwd.plan import (
    BF16,
    BLOCK_BYTES,
    CHUNK,
    CHUNK_BYTES,
    CHUNKS,
    IMAGE_BYTES,
    ROWS,
    TILE_KEYS,
)
from flashdsa.problem import INDEX_HEAD_DIM

LINE_BYTES = CHUNK * BF16
STEP_LINES = MMA_K * LINE_BYTES
"""Bytes from 16 lines to the next ones, where K of a product is along the lines."""
STEP_COLUMNS = MMA_K * BF16
OF_SCORES = TILE_KEYS // 2
"""fp32 of q k, or of 64 dims of dK, in a thread."""
OF_DQ = INDEX_HEAD_DIM // 2


def _multiply(acc: Any, columns: int, a: Any, b: Any, accumulate: bool, transposes: Any) -> None:
    values = mma_async(
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{MMA_K}.f32.bf16.bf16",
        [acc[i] for i in range(columns // 2)],
        a,
        b,
        accumulate=accumulate,
        transposes=transposes,
    )
    for i in range(columns // 2):
        acc[i] = values[i]


def issue_scores(acc: Any, q: Any, k: Any) -> None:
    """Issue acc = Q K^T of 64 rows and 64 keys, as one group; q, k: addresses."""
    warpgroup.fence()
    a, b = opaque(along_k(q)), opaque(along_k(k))
    for chunk in range(CHUNKS):
        for step in range(CHUNK // MMA_K):
            offset = chunk * CHUNK_BYTES + step * STEP_COLUMNS
            first, second = descriptor_behind(a, offset), descriptor_behind(b, offset)
            _multiply(acc, TILE_KEYS, first, second, (chunk, step) != (0, 0), (0, 0))
    warpgroup.commit_group()


def issue_dq(acc: Any, image: Any, k: Any) -> None:
    """Issue acc += A K of 64 rows, as one group; image, k: addresses."""
    warpgroup.fence()
    a, b = opaque(along_k(image)), opaque(along_n(k))
    for step in range(TILE_KEYS // MMA_K):
        first = descriptor_behind(a, step * STEP_COLUMNS)
        second = descriptor_behind(b, step * STEP_LINES)
        _multiply(acc, INDEX_HEAD_DIM, first, second, True, (0, 1))
    warpgroup.commit_group()


def issue_dk(acc: Any, images: Any, q: Any, blocks: int) -> None:
    """Issue acc = A^T Q of 64 keys and 64 dims, as one group.

    Args:
        images: address of the group's images. q: of the chunk of those dims in the first block.
    """
    warpgroup.fence()
    a, b = opaque(along_n(images)), opaque(along_n(q))
    for block in range(blocks):
        for step in range(ROWS // MMA_K):
            first = descriptor_behind(a, block * IMAGE_BYTES + step * STEP_LINES)
            second = descriptor_behind(b, block * BLOCK_BYTES + step * STEP_LINES)
            _multiply(acc, CHUNK, first, second, (block, step) != (0, 0), (1, 1))
    warpgroup.commit_group()
