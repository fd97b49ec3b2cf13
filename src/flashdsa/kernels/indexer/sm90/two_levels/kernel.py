"""Ranking in two levels, for Hopper: the best blocks by given scores, or tokens of listed blocks.

load warp  | 4 consumer warpgroups
---------- | ------------------------------------------------------------------------
           | empty rows: -1
work tiles | mark the listed blocks; append (key, entry), histogram; threshold; ids

A block's score is the best of its tokens'; infinity, if blocks have several and it has the newest.
Entries that may not be chosen are never appended: tokens of other blocks, and all of pages that
the cache does not have.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import WORD_ALIGNMENT, fake_tensor
from flashdsa.dsl.memory import Region
from flashdsa.hw import SM90
from flashdsa.kernels.indexer.emit import PAGE_BITS, Output, set_bit
from flashdsa.kernels.indexer.launch import launch_shape, rows_apart
from flashdsa.kernels.indexer.schedule.work_tile import Rows, WorkTile, request_of
from flashdsa.kernels.indexer.select.keys import sortable
from flashdsa.kernels.indexer.select.lists import Listed, append_all
from flashdsa.kernels.indexer.sm90.topk_kernel import rank_scores
from flashdsa.kernels.indexer.sm90.two_levels.plan import WORD_BITS, LevelPlan
from flashdsa.kernels.indexer.smem_views import IndexerMemory, Scratch, Selecting, consumer_sync
from flashdsa.problem import PAGE_SIZE


class LevelMemory(IndexerMemory):
    """Regions of `LevelPlan`."""

    marks: Region


class GivenScores(NamedTuple):
    """Scores of tokens in device memory, and which of them may be chosen."""

    scores: Any  # (B, max_len) fp32, any distance between rows; of tokens, or of whole blocks
    starts: Any  # (B,) int32: where a row's first token is; (0,): at 0
    candidates: Any  # (B, n) int32: ids of blocks; (B, 0) where entries are blocks
    block_table: Any  # (B / next_n, max_pages) int32; (0, 0): tokens have no pages
    num_pages: Int32  # of the cache
    block_bits: Int32  # a block has 1 << block_bits tokens
    score_bits: Int32  # and as many scores as 1 << score_bits
    rows: Rows  # their lengths in entries
    marks: Any  # (marked_words,) Int32 in shared memory; None: entries are blocks


@cute.jit
def row_scores(given: GivenScores, row: Int32) -> tuple[Any, Int32]:
    """Pointer to the row's first score, and scores that follow in the matrix, it among them."""
    start = Int32(0)
    if given.starts.shape[0] > 0:
        start = cutlass.min(cutlass.max(given.starts[row], Int32(0)), given.scores.shape[1])
    line = given.scores.iterator + (Int64(row) * given.scores.stride[0] + start)
    return line, given.scores.shape[1] - start


@cute.jit
def has_page(given: GivenScores, row: Int32, token: Int32) -> cutlass.Boolean:
    """Whether the cache has the page of a token of the row."""
    found = cutlass.Boolean(True)
    if given.block_table.shape[0] > 0:
        request = request_of(given.rows, row)
        at = Int64(request) * given.block_table.stride[0] + (token >> PAGE_BITS)
        page = (given.block_table.iterator + at).load()
        found = page >= 0 and page < given.num_pages
    return found


@cute.jit
def mark_blocks(s: Selecting, given: GivenScores, tile: WorkTile) -> None:
    """Set the bits of the listed blocks of the tile that have a token to choose. Ends synced."""
    thread, plan = s.thread, s.plan
    first = tile.first_page * PAGE_SIZE >> given.block_bits
    blocks = tile.num_pages * PAGE_SIZE >> given.block_bits
    words = (blocks + WORD_BITS - 1) // WORD_BITS
    for word in cutlass.range(thread, words, plan.consumer_threads, unroll=1):
        given.marks[word] = Int32(0)
    consumer_sync(plan)
    of_row = (tile.length + (Int32(1) << given.block_bits) - 1) >> given.block_bits
    end = cutlass.min(first + blocks, of_row)
    line = given.candidates.iterator + Int64(tile.row) * given.candidates.stride[0]
    count = Int32(given.candidates.shape[1])
    for i in cutlass.range(thread, count, plan.consumer_threads, unroll=4):
        listed = (line + i).load()
        if listed >= first and listed < end:
            if has_page(given, tile.row, listed << given.block_bits):
                set_bit(given.marks, listed - first)
    consumer_sync(plan)


@cute.jit
def load_blocks(
    values: cute.Tensor,
    wanted: cute.Tensor,
    given: GivenScores,
    tile: WorkTile,
    first: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Load this thread's blocks: `first`, and every consumer_threads-th one before `end`; the best
    number of each one's tokens, NaN if none is a number."""
    line, room = row_scores(given, tile.row)
    for i in cutlass.range_constexpr(plan.read_together):
        values[i] = Float32.nan
    for score in cutlass.range(Int32(1) << given.score_bits, unroll=1):
        for i in cutlass.range_constexpr(plan.read_together):
            block = first + i * plan.consumer_threads
            at = (block << given.score_bits) + score
            if block < end and at < room:
                values[i] = cute.arch.fmax(values[i], (line + at).load())
    for i in cutlass.range_constexpr(plan.read_together):
        block = first + i * plan.consumer_threads
        wanted[i] = Int32(0)
        if block < end:
            wanted[i] = Int32(has_page(given, tile.row, block << given.block_bits))
        if given.block_bits > 0 and block == tile.length - 1:
            values[i] = Float32.inf


@cute.jit
def load_tokens(
    values: cute.Tensor,
    wanted: cute.Tensor,
    given: GivenScores,
    tile: WorkTile,
    first: Int32,
    end: Int32,
    plan: cutlass.Constexpr,
) -> None:
    """Same as `load_blocks`, of tokens: those of marked blocks."""
    line, _ = row_scores(given, tile.row)
    part = tile.first_page * PAGE_SIZE
    for i in cutlass.range_constexpr(plan.read_together):
        token = first + i * plan.consumer_threads
        values[i] = Float32(0.0)
        wanted[i] = Int32(0)
        if token < end:
            block = token - part >> given.block_bits
            wanted[i] = given.marks[block // WORD_BITS] >> block % WORD_BITS & 1
        if wanted[i] != 0:
            values[i] = (line + token).load()


@cute.jit
def list_entries(
    s: Selecting, given: GivenScores, tile: WorkTile, stage: Int32, listed: Listed
) -> Listed:
    """Add entries of the tile while the list has room for as many as all threads load at once. The
    list has room for them at the start; see `refill_pages`. 64 entries count as a page."""
    select, thread, plan = s.select, s.thread, s.plan
    together = plan.read_together * plan.consumer_threads
    load = const_expr(load_tokens if plan.among else load_blocks)
    if const_expr(plan.among):
        if listed.pages == 0:
            mark_blocks(s, given, tile)
    entries, floor = listed.entries, listed.floor
    last = cutlass.min((tile.first_page + tile.num_pages) * PAGE_SIZE, tile.length)
    begin = (tile.first_page + listed.pages) * PAGE_SIZE
    values = cute.make_rmem_tensor(plan.read_together, Float32)
    wanted = cute.make_rmem_tensor(plan.read_together, Int32)
    keys = cute.make_rmem_tensor(plan.read_together, Uint32)
    numbers = cute.make_rmem_tensor(plan.read_together, Int32)
    reads = cutlass.Boolean(True)
    while reads:
        load(values, wanted, given, tile, begin + thread, last, plan)
        for i in cutlass.range_constexpr(plan.read_together):
            keys[i] = sortable(values[i])
            numbers[i] = begin + thread + i * plan.consumer_threads
            if keys[i] < floor:
                wanted[i] = Int32(0)
        append_all(select, keys, numbers, wanted, plan.read_together)
        begin += together
        # All consumers: every entry is in the list, and counted.
        consumer_sync(plan)
        entries = select.scratch[Scratch.COUNT]
        consumer_sync(plan)  # everyone has read the count, so that it may be written again
        reads = begin < last and plan.lists.capacity - entries >= together
    stop = cutlass.min(begin // PAGE_SIZE - tile.first_page, tile.num_pages)
    return Listed(entries, stop, floor)


@cute.kernel
def level_kernel(given: GivenScores, ids: cute.Tensor, plan: cutlass.Constexpr):
    """One CTA of the grid; arguments as in `launch_level`."""
    memory = LevelMemory.allocate(plan)
    marks = memory.marks.array(Int32, plan.marked_words) if const_expr(plan.among) else None
    id_table = None if const_expr(plan.positions) else given.block_table
    output = Output(ids, None, id_table, given.num_pages, given.rows)
    rank_scores(memory, output, given._replace(marks=marks), list_entries, plan)


@cute.jit
def launch_level(
    plan: cutlass.Constexpr,
    stream: Any,
    scores: cute.Tensor,
    lengths: cute.Tensor,
    starts: cute.Tensor,
    candidates: cute.Tensor,
    block_table: cute.Tensor,
    num_pages: Int32,
    block_bits: Int32,
    score_bits: Int32,
    ids: cute.Tensor,
    num_clusters: Int32,
    cluster_size: Int32,
):
    """Launch on `stream`.

    Args:
        scores: (B, max_len) fp32 of tokens, any distance between rows. Blocks may have one score
            each in place of their tokens'.
        lengths: (B,) int32, in entries: of blocks, or of tokens.
        starts: (B,) int32, the column of each row's first token; (0,): 0.
        candidates: (B, n) int32 ids of blocks, in any order, anything beyond the row; (B, 0) for
            blocks. A row's blocks are at most `plan.most_blocks`.
        block_table: (B / next_n, max_pages) int32, pages of the tokens; (0, 0): none.
        num_pages: of the cache. block_bits: binary logarithm of a block's tokens.
        score_bits: of the scores that a block has in `scores`.
        ids: (B, topk) int32, written: of blocks, or positions or slots of tokens.
        num_clusters, cluster_size: as in `launch_indexer`.
    """
    entries = Int32(scores.shape[1])
    if const_expr(not plan.among):
        entries = (entries + (Int32(1) << score_bits) - 1) >> score_bits
    rows = Rows(lengths, lengths.shape[0], entries, block_table.shape[0])
    given = GivenScores(
        scores, starts, candidates, block_table, num_pages, block_bits, score_bits, rows, None
    )
    level_kernel(given, ids, plan).launch(
        **launch_shape(num_clusters, cluster_size, plan), stream=stream
    )


def compile_level(plan: LevelPlan) -> Any:
    """Compile `launch_level`."""
    rows, starts, width, listed, requests, pages = (cute.sym_int32() for _ in range(6))
    return compile_launch(
        SM90,
        launch_level,
        plan,
        rows_apart(Float32, rows, width),
        fake_tensor(Int32, (rows,), WORD_ALIGNMENT),
        fake_tensor(Int32, (starts,), WORD_ALIGNMENT),
        rows_apart(Int32, rows, listed),
        rows_apart(Int32, requests, pages),
        *(Int32(1) for _ in range(3)),
        fake_tensor(Int32, (rows, plan.topk), WORD_ALIGNMENT),
        Int32(1),
        Int32(1),
    )
