"""Scores of a key tile from its product: a lane's are summed, stored and counted.

A `Keeper` says which: of the keys in a query's range, of those that are listed, or of blocks. A
warp scores two blocks of 8 keys, of which a lane has a score each for each of its queries. Lanes
that have scores of the same blocks are 4, 8 and 16 apart. They share the blocks out, and then each
keeps one.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from flashdsa.dsl.gmem import store_if
from flashdsa.kernels.indexer.score_batch import LANES_APART, doubled_relu
from flashdsa.kernels.indexer.select.keys import INVALID
from flashdsa.kernels.indexer.sm90.prefill.entries import (
    INFINITE,
    PrefillMemory,
    count_word,
    count_words,
)
from flashdsa.kernels.indexer.sm90.prefill.plan import QUERY_GROUP
from flashdsa.kernels.indexer.sm90.prefill.tiles import (
    LaneBits,
    Ranges,
    Tile,
    lane_bits,
    load_listed,
    whole_entries,
)


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


CHAINS = 8
"""Partial sums of a score: of heads with the same remainder, added up at the end."""
HALVES, ROWS_APART = 2, 8
"""Keys of a lane, and their distance."""


class KeepsKeys(NamedTuple):
    """Keeps the scores of all keys in a query's range."""

    ranges: Ranges
    prepared: Any  # `Prepared`, score.py
    tile: Tile
    memory: PrefillMemory

    @property
    def plan(self) -> Any:
        return self.memory.plan

    def first_query(self, lane: Int32) -> Int32:
        """The lane's first query of the tile."""
        return lane % QUERY_GROUP

    def place(self, key: Int32) -> Int32:
        """The entry whose score the lane stores first, of those of a tile; key: its first one."""
        return key

    def load(self, key: Int32) -> Any:
        """Load what decides on the lane's keys, the first of which is `key` of the tile."""
        return None

    def keep(
        self, accumulator: Any, scales: list[Float32], key: Int32, to: Any, listed: Any
    ) -> tuple[list[Int32], list[Int32]]:
        """Store the lane's scores; return their words, and those from which a window is made. to:
        pointer to the score of the lane's first entry. listed: result of `load`."""
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
        return words, words

    def total(self, accumulator: Any, group: int, half: int) -> Float32:
        return sum_heads(accumulator, self.prepared.weights, group, half, self.plan)

    def set_window(self, window: cute.Tensor) -> None:
        """Prepare the window for `count_words`, after it was set."""

    def count_words(self, words: list[Int32], window: cute.Tensor, bins: Int32) -> None:
        """Count the words that `keep` returned. bins: as in `count_words`."""
        count_words(words, window, bins, self.plan)


class KeepsListed(NamedTuple):
    """Keeps the scores of listed keys."""

    keys: KeepsKeys
    bits: LaneBits

    def first_query(self, lane: Int32) -> Int32:
        return self.keys.first_query(lane)

    def place(self, key: Int32) -> Int32:
        return key

    def load(self, key: Int32) -> list[Int32]:
        return load_listed(self.bits, key, self.keys.plan)

    def keep(
        self, accumulator: Any, scales: list[Float32], key: Int32, to: Any, listed: list[Int32]
    ) -> tuple[list[Int32], list[Int32]]:
        """As `KeepsKeys.keep`. A window is made from keys that are not listed, too: few are."""
        keys, words, sample = self.keys, [], []
        for group in range(keys.plan.groups):
            for half in range(HALVES):
                word = word_of_score(keys.total(accumulator, group, half), scales[half])
                at = to + (Int64(group) * keys.plan.row_words * QUERY_GROUP + half * ROWS_APART)
                words.append(store_listed(at, word, listed[group] & self.bits.own[half]))
                sample.append(word)
        return words, sample

    def set_window(self, window: cute.Tensor) -> None:
        """As `KeepsKeys.set_window`."""

    def count_words(self, words: list[Int32], window: cute.Tensor, bins: Int32) -> None:
        self.keys.count_words(words, window, bins)


class KeepsBlocks(NamedTuple):
    """Keeps the best score of each block: one a lane."""

    keys: KeepsKeys
    own: OwnBlock
    lane: Int32

    def first_query(self, _: Int32) -> Int32:
        return self.own.query

    def place(self, key: Int32) -> Int32:
        return whole_entries(key, self.keys.plan) + self.own.half

    def load(self, key: Int32) -> Any:
        return None

    def keep(
        self, accumulator: Any, scales: list[Float32], key: Int32, to: Any, listed: Any
    ) -> tuple[list[Int32], list[Int32]]:
        keys, scores = self.keys, []
        for half in range(HALVES):
            for group in range(keys.plan.groups):
                total = keys.total(accumulator, group, half)
                scores.append(word_of_score(total, scales[half]).bitcast(Float32))
        block = self.place(keys.tile.first_key + key)
        word = block_word(best_of_own(scores, self.lane), block, self.own)
        store_if(self.own.is_first, to, word)
        return [word], words_of_sample(word, self.own, keys.plan)

    def set_window(self, window: cute.Tensor) -> None:
        keep_own_window(window, self.own, self.keys.plan)

    def count_words(self, words: list[Int32], window: cute.Tensor, bins: Int32) -> None:
        count_word(words[0], window, bins, self.own.is_first, self.keys.plan)


Keeper = KeepsKeys | KeepsListed | KeepsBlocks


def keeper_of(
    ranges: Ranges, prepared: Any, tile: Tile, lane: Int32, memory: PrefillMemory
) -> Keeper:
    """The calling lane's keeper of a tile."""
    keys, plan = KeepsKeys(ranges, prepared, tile, memory), memory.plan
    if plan.among:
        return KeepsListed(keys, lane_bits(ranges, tile, lane, plan))
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


@cute.jit
def store_listed(to: Any, word: Int32, listed: Int32) -> Int32:
    """Store a score's word if `listed` is not 0, else `INVALID`; return what was stored."""
    if listed == 0:
        word = Int32(INVALID)
    to.store(word)
    return word


def word_of_score(total: Float32, scale: Float32) -> Int32:
    """Bits of a score, total * scale + 0, rounded once: the product, and +0 where it is -0."""
    score = cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, 0f00000000;",
        write_only_types=[Float32],
        read_only_args=[total, scale],
    )
    return score.bitcast(Int32)
