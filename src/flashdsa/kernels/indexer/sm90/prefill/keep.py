"""Scores of a key tile from its product: a lane's are summed, stored and counted.

A `Keeper` says which: of the keys in a query's range, or of blocks. A warp scores two blocks of 8
keys, of which a lane has a score each for each of its queries. Lanes that have scores of the same
blocks are 4, 8 and 16 apart. They share the blocks out, and then each keeps one.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from flashdsa.dsl.gmem import store_if
from flashdsa.dsl.memory import Memory
from flashdsa.kernels.indexer.score_batch import LANES_APART, doubled_relu
from flashdsa.kernels.indexer.select.sort_keys import INVALID
from flashdsa.kernels.indexer.sm90.prefill.plan import QUERY_GROUP
from flashdsa.kernels.indexer.sm90.prefill.tiles import Ranges, Tile, entries_of


class OwnBlock(NamedTuple):
    """The block that a lane keeps, of each key tile that its warp scores."""

    query: Int32  # of the tile
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
    return OwnBlock(query, half, newest, is_first)


@cute.jit
def best_of_own(scores: list[Float32], lane: Int32) -> Float32:
    """The best number among the scores of the block that the lane keeps; NaN if there is none.
    scores: of the lane's keys: of the first block for each query, then of the second one."""
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
def is_wanted(own: OwnBlock, block: Int32) -> Int32:
    """1 if the lane stores the score of the block, else 0."""
    return own.is_first if block <= own.newest else Int32(0)


CHAINS = 8
"""Partial sums of a score: of heads with the same remainder, added up at the end."""
HALVES, ROWS_APART = 2, 8
"""Keys of a lane, and their distance."""


class KeepsKeys(NamedTuple):
    """Keeps the scores of all keys in a query's range."""

    ranges: Ranges
    prepared: Any  # `Prepared`, score.py
    tile: Tile
    memory: Memory

    @property
    def plan(self) -> Any:
        return self.memory.plan

    def first_query(self, lane: Int32) -> Int32:
        """The lane's first query of the tile."""
        return lane % QUERY_GROUP

    def place(self, key: Int32) -> Int32:
        """The entry whose score the lane stores first, of those of a tile; key: its first one."""
        return key

    def keep(self, accumulator: Any, scales: list[Float32], key: Int32, to: Any) -> list[Int32]:
        """Store the lane's scores; return their words. key: of the tile, the lane's first. to:
        pointer to its score."""
        words = []
        for group in range(self.plan.groups):
            for half in range(HALVES):
                apart = half * ROWS_APART
                total = self.total(accumulator, group, half)
                seen = Uint32(
                    self.tile.first_key + key + apart - self.prepared.starts[group]
                ) < Uint32(self.prepared.lengths[group])
                at = to + (Int64(group) * group_words(self.ranges, self.plan) + apart)
                words.append(store(at, total, scales[half], seen, self.plan))
        return words

    def total(self, accumulator: Any, group: int, half: int) -> Float32:
        return sum_heads(accumulator, self.prepared.weights, group, half, self.plan)


class KeepsBlocks(NamedTuple):
    """Keeps the best score of each block up to the query's newest, which may have keys behind the
    range's end: one a lane."""

    keys: KeepsKeys
    own: OwnBlock
    lane: Int32

    def first_query(self, _: Int32) -> Int32:
        return self.own.query

    def place(self, key: Int32) -> Int32:
        return entries_of(key, self.keys.plan) + self.own.half

    def keep(self, accumulator: Any, scales: list[Float32], key: Int32, to: Any) -> list[Int32]:
        """As `KeepsKeys.keep`; nothing counts these scores."""
        keys, scores = self.keys, []
        for half in range(HALVES):
            for group in range(keys.plan.groups):
                total = keys.total(accumulator, group, half)
                scores.append(word_of_score(total, scales[half]).bitcast(Float32))
        block = self.place(keys.tile.first_key + key)
        best = best_of_own(scores, self.lane).bitcast(Int32)
        store_if(is_wanted(self.own, block), to, best)
        return []


Keeper = KeepsKeys | KeepsBlocks


def keeper_of(ranges: Ranges, prepared: Any, tile: Tile, lane: Int32, memory: Memory) -> Keeper:
    """The calling lane's keeper of a tile."""
    keys, plan = KeepsKeys(ranges, prepared, tile, memory), memory.plan
    if plan.of_blocks:
        return KeepsBlocks(keys, own_block(prepared.lengths, lane, plan), lane)
    return keys


def sum_heads(accumulator: Any, weights: Any, group: int, half: int, plan: Any) -> Float32:
    """The weighted sum over all heads of the lane's query of a group, for one of its keys."""
    # Sums start at 0, so that every product is added without being rounded, as in the paged
    # indexer.
    sums = [Float32(0.0)] * CHAINS
    for head in range(plan.num_heads):
        column, odd = group * plan.num_heads // 2 + head // 2, head % 2
        value = doubled_relu(accumulator[4 * column + 2 * half + odd])
        sums[head % CHAINS] += weights[group * plan.num_heads + head] * value
    pairs = [sums[2 * i] + sums[2 * i + 1] for i in range(CHAINS // 2)]
    return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])


def group_words(ranges: Ranges, plan: Any) -> Any:
    """Words from a query to the one four later."""
    return QUERY_GROUP * (Int64(ranges.num_keys) if plan.scores_only else plan.row_words)


@cute.jit
def store(
    to: Any, total: Float32, scale: Float32, seen: cutlass.Boolean, plan: cutlass.Constexpr
) -> Int32:
    """Store a score, total * scale, if its query sees the key: as it is, or as bits that are
    ranked. Return the bits."""
    bits = Int32(INVALID)
    if cutlass.const_expr(plan.scores_only):
        if seen:
            to.store((total * scale).bitcast(Int32))
    else:
        bits = word_of_score(total, scale)
        if not seen:
            bits = Int32(INVALID)
        to.store(bits)
    return bits


def word_of_score(total: Float32, scale: Float32) -> Int32:
    """Bits of a score, total * scale + 0, rounded once: the product, and +0 where it is -0."""
    score = cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, 0f00000000;",
        write_only_types=[Float32],
        read_only_args=[total, scale],
    )
    return score.bitcast(Int32)
