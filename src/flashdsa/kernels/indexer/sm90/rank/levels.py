"""Entries of the ranking in two levels: whole blocks of tokens, or the tokens of listed blocks.

A block's score is the best of its tokens'; infinity, if blocks have several and it has the newest.
Entries that may not be chosen get the word INVALID: tokens of other blocks, and all of pages that
the cache does not have.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.emit import PAGE_BITS, set_bit
from flashdsa.kernels.indexer.schedule.work_tile import Rows, request_of
from flashdsa.kernels.indexer.select.keys import INVALID
from flashdsa.kernels.indexer.sm90.rank.plan import Of


class Levels(NamedTuple):
    """The operands from which entries' scores follow, beside the scores of tokens."""

    candidates: Any  # (B, n) int32: ids of blocks; (B, 0) where entries are blocks
    table: Any  # (B / next_n, max_pages) int32; (0, 0): tokens have no pages
    num_pages: Int32  # of the cache
    block_bits: Int32  # a block has 1 << block_bits tokens
    score_bits: Int32  # and as many scores as 1 << score_bits


class LevelRow(NamedTuple):
    """A part of a row."""

    levels: Levels
    line: Any  # pointer to the score of the row's first token
    room: Int32  # scores from it on in the matrix
    pages: Any  # pointer to the row's pages
    candidates: Any  # pointer to its listed blocks
    begin: Int32  # the part's first entry
    last: Int32  # entry of the row's newest token
    marks: Any  # (marked_words,) Int32 in shared memory: the part's listed blocks; None


@cute.jit
def level_row(
    levels: Levels,
    line: Any,
    room: Int32,
    rows: Rows,
    row: Int32,
    begin: Int32,
    last: Int32,
    marks: Any,
) -> LevelRow:
    """The caller's part of a row, whose scores are at `line`, with `room` for them."""
    pages = levels.table.iterator + Int64(request_of(rows, row)) * levels.table.stride[0]
    listed = levels.candidates.iterator + Int64(row) * levels.candidates.stride[0]
    return LevelRow(levels, line, room, pages, listed, begin, last, marks)


@cute.jit
def has_page(x: LevelRow, token: Int32) -> cutlass.Boolean:
    """Whether the cache has the page of a token."""
    found = cutlass.Boolean(True)
    if x.levels.table.shape[0] > 0:
        page = (x.pages + (token >> PAGE_BITS)).load()
        found = page >= 0 and page < x.levels.num_pages
    return found


@cute.jit
def mark_blocks(x: LevelRow, end: Int32, thread: Int32, plan: cutlass.Constexpr) -> None:
    """Set the bits of the listed blocks of the part, which ends before `end`. Ends synced."""
    bits = x.levels.block_bits
    first, last = x.begin >> bits, (end - 1) >> bits
    for word in cutlass.range(thread, (last - first) // WARP_SIZE + 1, plan.threads, unroll=1):
        x.marks[word] = Int32(0)
    cute.arch.sync_threads()
    count = Int32(x.levels.candidates.shape[1])
    for i in cutlass.range(thread, count, plan.threads, unroll=4):
        listed = (x.candidates + i).load()
        if listed >= first and listed <= last:
            if has_page(x, listed << bits):
                set_bit(x.marks, listed - first)
    cute.arch.sync_threads()


@cute.jit
def entry_score(x: LevelRow, entry: Int32, plan: cutlass.Constexpr) -> Float32:
    """The score of an entry of the part, or `INVALID`."""
    score = Int32(INVALID).bitcast(Float32)
    if const_expr(plan.of is Of.LISTED):
        block = (entry >> x.levels.block_bits) - (x.begin >> x.levels.block_bits)
        if x.marks[block // WARP_SIZE] >> block % WARP_SIZE & 1 != 0:
            score = (x.line + entry).load()
    elif has_page(x, entry << x.levels.block_bits):
        score = Float32.nan
        first = entry << x.levels.score_bits
        for i in cutlass.range(Int32(1) << x.levels.score_bits, unroll=1):
            if first + i < x.room:
                score = cute.arch.fmax(score, (x.line + (first + i)).load())
        if x.levels.block_bits > 0 and entry == x.last:
            score = Float32.inf
    return score
