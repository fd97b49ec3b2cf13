"""Rows of at most topk tokens, all of which are among the best: a CTA writes a row's ids.

The page ids and the length are loaded at the same time. Each warp keeps all page ids of the row, a
lane each, and so finds by itself where the tokens of each page go.
"""

from typing import Any

from cutlass import Int32, cute

from flashdsa.dsl import fake_tensors as fake
from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.grids import launch_ctas
from flashdsa.hw import SM90, WARP_SIZE
from flashdsa.kernels.indexer.emit import Output, cached_pages, emit_pages, first_pages
from flashdsa.kernels.indexer.schedule.work_tile import row_length, rows_of

THREADS = 512
"""Threads of a CTA, which writes a row: each has four of 2,048 ids."""


@cute.kernel
def unscored_kernel(
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    num_pages: Int32,
    slots: Int32,
):
    """One CTA; arguments as in `launch_unscored`."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    lane = thread % WARP_SIZE
    rows = rows_of(seq_lens, block_table)
    output = Output(topk_indices, None, block_table, num_pages, slots, rows)
    page = first_pages(output, row, lane)
    pages = cached_pages(page, row_length(rows, row), num_pages, lane)
    emit_pages(output, row, thread - lane, output.topk, THREADS, pages, lane)


@cute.jit
def launch_unscored(
    stream: Any,
    seq_lens: cute.Tensor,
    block_table: cute.Tensor,
    topk_indices: cute.Tensor,
    num_pages: Int32,
    slots: Int32,
):
    """Launch on `stream`; the table has at most `most_pages(topk)` pages a row.

    Args:
        seq_lens: (B,) int32. block_table: (B / next_n, max_pages) int32, any distance between rows.
        topk_indices: (B, topk) int32, any distance between rows, written.
        num_pages: of the cache. slots: 1: ids are slots of the cache; 0: positions.
    """
    made = unscored_kernel(seq_lens, block_table, topk_indices, num_pages, slots)
    launch_ctas(made, seq_lens.shape[0], THREADS, stream)


def compile_unscored(plan: Any) -> Any:
    """Compile `launch_unscored`."""
    del plan
    rows, requests, table, topk = fake.symbols(4)
    ids = fake.rows_apart(Int32, requests, table), fake.rows_apart(Int32, rows, topk)
    x = fake.words(rows), *ids, Int32(1), Int32(1)
    return compile_launch(SM90, launch_unscored, None, *x)
