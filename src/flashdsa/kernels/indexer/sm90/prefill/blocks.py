"""The best of each block of 8 keys, from the registers of a warp that has scored two blocks.

A lane has a score of each block for each of its queries. Lanes that have scores of the same blocks
are 4, 8 and 16 apart. They share the blocks out, and then each keeps one.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from flashdsa.kernels.indexer.select.keys import INVALID
from flashdsa.kernels.indexer.sm90.block_scores import LANES_APART
from flashdsa.kernels.indexer.sm90.prefill.plan import QUERY_GROUP
from flashdsa.kernels.indexer.sm90.prefill.window import INFINITE


class OwnBlock(NamedTuple):
    """The block that a lane keeps, of each key tile that its warp scores."""

    query: Int32  # of the tile
    group: Int32  # of that query
    half: Int32  # block of the warp's two
    newest: Int32  # number of the query's last block; -1: it has none
    is_first: Int32  # 1 in the first of the lanes that keep it


@cute.jit
def own_block(lengths: list[Int32], lane: Int32, plan: cutlass.Constexpr) -> OwnBlock:
    """The calling lane's. lengths: of the ranges of its queries."""
    half, group, length, same = lane >> 4, Int32(0), lengths[0], 12
    if cutlass.const_expr(plan.groups == 2):
        group, same = lane >> 3 & 1, 4
        if group == 1:
            length = lengths[1]
    newest = (length + (plan.entry_keys - 1)) // plan.entry_keys - 1
    is_first = Int32(1) if lane & same == 0 else Int32(0)
    query = lane % QUERY_GROUP + QUERY_GROUP * group
    return OwnBlock(query, group, half, newest, is_first)


@cute.jit
def best_of_own(scores: list[Float32], lane: Int32) -> Float32:
    """The best number among the scores of the block that the lane keeps; NaN if there is none.

    Args:
        scores: of the lane's keys: of the first block for each query, then of the second one.
    """
    for apart in cutlass.range_constexpr(len(LANES_APART)):
        scores = shared_out(scores, lane, LANES_APART[-1 - apart])
    return scores[0]


def shared_out(scores: list[Float32], lane: Int32, apart: int) -> list[Float32]:
    """The best of this lane's scores and those of the lane `apart` from it: of one half of several,
    the second half in the upper of the two lanes."""
    count = len(scores) // 2
    if not count:
        return [better(scores[0], scores[0], apart)]
    upper = lane & apart != 0
    return [exchanged(scores[i], scores[count + i], upper, apart) for i in range(count)]


@cute.jit
def exchanged(
    low: Float32, high: Float32, upper: cutlass.Boolean, apart: cutlass.Constexpr
) -> Float32:
    """The best of the score that the lane keeps, `high` in the upper one, and the other's."""
    kept = high if upper else low
    sent = low if upper else high
    return better(kept, sent, apart)


def better(kept: Float32, sent: Float32, apart: int) -> Float32:
    """The better number of `kept` and what the lane `apart` sends."""
    return cute.arch.fmax(kept, cute.arch.shuffle_sync_bfly(sent, apart))


@cute.jit
def block_word(best: Float32, block: Int32, own: OwnBlock) -> Int32:
    """Word of a block's score (entries.py). The newest one comes first, and all blocks before it
    have no key past the range's end."""
    word = best.bitcast(Int32)
    if block == own.newest:
        word = Int32(INFINITE)
    if block > own.newest:
        word = Int32(INVALID)
    return word


@cute.jit
def words_of_sample(word: Int32, own: OwnBlock, plan: cutlass.Constexpr) -> list[Int32]:
    """A lane's word, in the place of its query's keys."""
    words = []
    for group in cutlass.range_constexpr(plan.groups):
        words += [word if group == own.group else Int32(INVALID), Int32(INVALID)]
    return words


@cute.jit
def keep_own_window(window: cute.Tensor, own: OwnBlock, plan: cutlass.Constexpr) -> None:
    """Put the window of the lane's block into the place of the first one."""
    if cutlass.const_expr(plan.groups == 2):
        if own.group == 1:
            window[0], window[1] = window[2], window[3]
