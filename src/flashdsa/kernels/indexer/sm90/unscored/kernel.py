"""Rows of at most topk tokens, all of which are among the best: a CTA writes a row's ids.

The page ids and the length are loaded at the same time. Each warp keeps all page ids of the row, a
lane each, and so finds by itself where the tokens of each page go.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, const_expr, cute

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.hw import SM90, WARP_SIZE
from flashdsa.kernels.indexer.emit.output import PAGE_BITS
from flashdsa.kernels.indexer.launch import rows_apart
from flashdsa.kernels.indexer.schedule.work_tile import request_of, row_length, rows_of
from flashdsa.kernels.indexer.sm90.unscored.plan import THREADS, UnscoredPlan
from flashdsa.problem import PAGE_SIZE


@cute.kernel
def unscored_kernel(
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    num_pages: Int32,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_unscored`."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    lane = thread % WARP_SIZE
    rows = rows_of(seq_lens, block_table)
    page = Int32(-1)
    if lane < block_table.shape[1]:
        at = Int64(request_of(rows, row)) * block_table.stride[0] + lane
        page = (block_table.iterator + at).load()
    length = row_length(rows, row)
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    cached = Int32(cute.arch.vote_ballot_sync(lane < pages and page >= 0 and page < num_pages))
    # Every page is full but the last.
    total = Int32(cute.arch.popc(cached)) * PAGE_SIZE
    if pages > 0 and (cached >> (pages - 1)) & 1 == 1:
        total -= pages * PAGE_SIZE - length
    topk = Int32(topk_indices.shape[1])
    ids = topk_indices.iterator + Int64(row) * topk
    for first in cutlass.range(thread - lane, topk, THREADS, unroll=4):
        position = first + lane
        index = position >> PAGE_BITS
        start = index * PAGE_SIZE
        if const_expr(not plan.positions):
            start = cute.arch.shuffle_sync(page, index) * PAGE_SIZE
        offset = position & (PAGE_SIZE - 1)
        if position < length and (cached >> index) & 1 == 1:
            before = Int32(cute.arch.popc(cached & ((Int32(1) << index) - 1)))
            (ids + (before * PAGE_SIZE + offset)).store(start + offset)
        if total <= position and position < topk:
            (ids + position).store(Int32(-1))


@cute.jit
def launch_unscored(
    plan: cutlass.Constexpr,
    stream: Any,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    num_pages: Int32,
):
    """Launch on `stream`; the table has at most `most_pages(topk)` pages a row.

    Args:
        seq_lens: (B,) int32. block_table: (B / next_n, max_pages) int32, any distance between rows.
        topk_indices: (B, topk) int32, written. num_pages: of the cache.
    """
    unscored_kernel(seq_lens, block_table, topk_indices, num_pages, plan).launch(
        grid=[seq_lens.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream
    )


def compile_unscored(plan: UnscoredPlan) -> Any:
    """Compile `launch_unscored`."""
    rows, requests, table, topk = (cute.sym_int32() for _ in range(4))
    return compile_launch(
        SM90,
        launch_unscored,
        plan,
        fake_tensor(Int32, (rows,), WORD_ALIGNMENT),
        rows_apart(Int32, requests, table),
        fake_tensor(Int32, (rows, topk), WORD_ALIGNMENT),
        Int32(1),
    )
