"""Prefetch of page tables and weights into the second-level cache."""

import cutlass
from cutlass import Int32, Int64, cute

from flashdsa.dsl.gmem import prefetch

LINE_WORDS = 32
"""32-bit words of a cache line."""


@cute.jit
def prefetch_inputs(
    block_table: cute.Tensor,
    weights: cute.Tensor,
    thread: Int32,
    threads: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Prefetch what is read after `seq_lens`; the caller is `thread` of `threads` that share the
    lines.

    Args:
        block_table: (B / next_n, max_pages) int32, any distance between rows. weights: (B, H) fp32.
    """
    lines = (block_table.shape[1] + LINE_WORDS - 1) // LINE_WORDS
    for line in cutlass.range(thread, block_table.shape[0] * lines, threads, unroll=1):
        row = line // lines
        at = Int64(row) * block_table.stride[0] + (line - row * lines) * LINE_WORDS
        prefetch(block_table.iterator + at)
    count = weights.shape[0] * plan.num_heads
    for at in cutlass.range(thread * LINE_WORDS, count, threads * LINE_WORDS, unroll=1):
        prefetch(weights.iterator + at)
