"""Entries of the ranking in two levels: whole blocks of tokens, or the tokens of listed blocks.

A block's score is the best of its tokens'; infinity, if blocks have several and it has the newest.
Listed blocks come in any order, some twice: they are marked, then listed in order, so that entries
are their tokens alone. Where they are too many for that, all tokens of the part are entries. Those
that may not be chosen get the word INVALID: tokens of other blocks or beyond the part, and all of
pages that the cache does not have.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.dsl.warp import lowest_bit, ones_of, prefix_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.emit import PAGE_BITS, set_bit
from flashdsa.kernels.indexer.schedule.work_tile import Rows, request_of
from flashdsa.kernels.indexer.select.sort_keys import INVALID


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
    begin: Int32  # the part's first token, or block
    end: Int32
    last: Int32  # the row's newest one


@cute.jit
def level_row(
    levels: Levels,
    line: Any,
    room: Int32,
    rows: Rows,
    row: Int32,
    begin: Int32,
    end: Int32,
    last: Int32,
) -> LevelRow:
    """The caller's part of a row, whose scores are at `line`, with `room` for them."""
    pages = levels.table.iterator + Int64(request_of(rows, row)) * levels.table.stride[0]
    listed = levels.candidates.iterator + Int64(row) * levels.candidates.stride[0]
    return LevelRow(levels, line, room, pages, listed, begin, end, last)


@cute.jit
def has_page(x: LevelRow, token: Int32) -> cutlass.Boolean:
    """Whether the cache has the page of a token."""
    found = cutlass.Boolean(True)
    if x.levels.table.shape[0] > 0:
        page = (x.pages + (token >> PAGE_BITS)).load()
        found = page >= 0 and page < x.levels.num_pages
    return found


class Listed(NamedTuple):
    """The listed blocks of a part, whose tokens are its entries."""

    marks: cute.Tensor  # (marked_words,) Int32 in shared memory: a bit for each block of the part
    blocks: cute.Tensor  # (most_listed,) Int32: their numbers, in order
    count: Int32  # of them; -1: they are too many, and all tokens of the part are entries


def no_list(memory: Any, plan: Any) -> Listed:
    """The room for it."""
    marks = memory.marks.array(Int32, plan.marked_words)
    return Listed(marks, memory.blocks.array(Int32, plan.most_listed), Int32(-1))


@cute.jit
def list_blocks(x: LevelRow, room: Listed, thread: Int32, plan: cutlass.Constexpr) -> Listed:
    """List the listed blocks of the part, which is not empty. Ends synced."""
    marks, blocks, _ = room
    bits = x.levels.block_bits
    first, last = x.begin >> bits, (x.end - 1) >> bits
    words = (last - first) // WARP_SIZE + 1
    for word in cutlass.range(thread, words, plan.threads, unroll=1):
        marks[word] = Int32(0)
    cute.arch.sync_threads()
    given = Int32(x.levels.candidates.shape[1])
    for i in cutlass.range(thread, given, plan.threads, unroll=4):
        listed = (x.candidates + i).load()
        if listed >= first and listed <= last:
            if has_page(x, listed << bits):
                set_bit(marks, listed - first)
    cute.arch.sync_threads()  # all are marked
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    # Every warp takes an equal part of the words, and counts the blocks before them itself.
    each = (words + plan.warps - 1) // plan.warps
    begin = cutlass.min(warp * each, words)
    end = cutlass.min(begin + each, words)
    at, count = ones_of(marks, Int32(0), begin, lane), ones_of(marks, Int32(0), words, lane)
    if count > plan.most_listed:
        begin, count = end, Int32(-1)
    for word in cutlass.range(begin + lane, end + lane, WARP_SIZE, unroll=1):
        mask = marks[word] if word < end else Int32(0)
        ones = Int32(cute.arch.popc(mask))
        through = prefix_sum(ones, lane)
        to = at + through - ones
        while mask != 0:
            blocks[to] = first + word * WARP_SIZE + lowest_bit(mask)
            mask = mask & (mask - 1)
            to += 1
        at += cute.arch.shuffle_sync(through, WARP_SIZE - 1)
    cute.arch.sync_threads()  # all are listed
    return Listed(marks, blocks, count)


@cute.jit
def listed_at_most(levels: Levels, length: Int32) -> Int32:
    """Tokens of a row's listed blocks, at most."""
    given = cutlass.min(Int32(levels.candidates.shape[1]), (length >> levels.block_bits) + 1)
    return cutlass.min(given << levels.block_bits, length)


@cute.jit
def token_of(x: LevelRow, listed: Listed, entry: Int32) -> Int32:
    """The token of an entry of the part; -1: it is no token of a listed block."""
    bits, token, has_bit = x.levels.block_bits, entry, Int32(1)
    if listed.count >= 0:
        inside = entry & ((Int32(1) << bits) - 1)
        token = (listed.blocks[entry >> bits] << bits) + inside
    else:
        block = (entry >> bits) - (x.begin >> bits)
        has_bit = listed.marks[block // WARP_SIZE] >> block % WARP_SIZE & 1
    if has_bit == 0 or token < x.begin or token >= x.end:
        token = Int32(-1)
    return token


@cute.jit
def token_score(x: LevelRow, listed: Listed, entry: Int32) -> Float32:
    """The score of an entry of the part, or `INVALID`."""
    score, token = Int32(INVALID).bitcast(Float32), token_of(x, listed, entry)
    if token >= 0:
        score = (x.line + token).load()
    return score


MANY_SCORE_BITS = 2
"""Binary logarithm of a block's scores from which a thread loads those of one after another's."""


@cute.jit
def best_with(score: Float32, x: LevelRow, at: Int32) -> Float32:
    """The better one of a score and the row's at some place, if it has one there."""
    if at < x.room:
        score = cute.arch.fmax(score, (x.line + at).load())
    return score


@cute.jit
def load_block_scores(
    scores: cute.Tensor, x: LevelRow, first: Int32, end: Int32, together: cutlass.Constexpr
) -> None:
    """Load the scores of up to `together` blocks of the part, WARP_SIZE apart, before `end`."""
    paged, bits = Int32(0), x.levels.score_bits
    for i in cutlass.range_constexpr(together):
        block = first + i * WARP_SIZE
        scores[i] = Float32.nan
        if block < end:
            scores[i] = Int32(INVALID).bitcast(Float32)
            if has_page(x, block << x.levels.block_bits):
                scores[i] = Float32.nan
                paged = paged | 1 << i
    # Few scores of all blocks at once; many of one block, whose sectors are then read once.
    if bits < MANY_SCORE_BITS:
        for token in cutlass.range(Int32(1) << bits, unroll=1):
            for i in cutlass.range_constexpr(together):
                if paged >> i & 1 == 1:
                    scores[i] = best_with(scores[i], x, ((first + i * WARP_SIZE) << bits) + token)
    else:
        for i in cutlass.range_constexpr(together):
            if paged >> i & 1 == 1:
                for token in cutlass.range(Int32(1) << bits, unroll=1):
                    scores[i] = best_with(scores[i], x, ((first + i * WARP_SIZE) << bits) + token)
    for i in cutlass.range_constexpr(together):
        newest = x.levels.block_bits > 0 and first + i * WARP_SIZE == x.last
        if paged >> i & 1 == 1 and newest:
            scores[i] = Float32.inf
