"""The wgmmas of a tile: 64 keys against the heads of a query, both from shared memory."""

from typing import Any

from flashdsa.dsl.wgmma import descriptor_behind, mma_async
from flashdsa.plan.row_tiles import ROW_BYTES

MMA_BYTES = 32
"""Bytes of a row that one wgmma multiplies: 16 columns."""


def multiply_chunk(acc: Any, k: Any, q: Any, num_heads: int, clear: bool) -> None:
    """Issue acc += K Q^T over the 64 columns of a chunk; with `clear` acc = K Q^T.

    Args:
        acc: num_heads / 2 fp32 in a thread. k, q: low words of the chunks' descriptors.
    """
    opcode = f"wgmma.mma_async.sync.aligned.m64n{num_heads}k16.f32.bf16.bf16"
    for step in range(ROW_BYTES // MMA_BYTES):
        values = mma_async(
            opcode,
            [acc[i] for i in range(num_heads // 2)],
            descriptor_behind(k, step * MMA_BYTES),
            descriptor_behind(q, step * MMA_BYTES),
            accumulate=not clear or step > 0,
            transposes=(0, 0),
        )
        for i in range(num_heads // 2):
            acc[i] = values[i]
