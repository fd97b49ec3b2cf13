"""Tiles of neighbouring queries: their assignment to CTAs, and the keys that they need.

Keys among which a query chooses are bits in device memory, which are loaded while keys are scored.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int16, Int32, Int64, cute

from flashdsa.dsl.gmem import load_half
from flashdsa.dsl.warp import uniform
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.plan import (
    CHUNK,
    QUERY_GROUP,
    SAMPLE_TILES,
    TILE_KEYS,
    WARP_KEYS,
)

NOWHERE = 0x7FFFFFFF
"""The start of an empty range."""


class Ranges(NamedTuple):
    """Key rows that each query sees, clamped to [0, num_keys)."""

    starts: cute.Tensor  # (S,) int32, or (0,): all start at row 0
    ends: cute.Tensor  # (S,) int32
    num_keys: Int32
    topk: Int32
    listed: Any = None  # `Listed`, tiles.py; None: all keys of a range may be chosen

    @property
    def num_queries(self) -> Int32:
        """S."""
        return Int32(self.ends.shape[0])


class Tile(NamedTuple):
    """A tile of queries, and its keys or a CTA's stretch of them. None of the queries needs scores
    if it has no key tiles; a stretch may have none."""

    first_query: Int32
    first_key: Int32
    key_tiles: Int32
    samples: Any = None  # first keys of two key tiles for the window; None: it has them


@cute.jit
def range_of(ranges: Ranges, query: Int32) -> tuple[Int32, Int32]:
    """(first row, one past the last) of a query; (0, 0) past the last query."""
    start, end = Int32(0), Int32(0)
    if query < ranges.num_queries:
        if ranges.starts.shape[0] != 0:
            start = ranges.starts[query]
        end = ranges.ends[query]
    start = cutlass.min(cutlass.max(start, Int32(0)), ranges.num_keys)
    end = cutlass.max(cutlass.min(end, ranges.num_keys), start)
    return start, end


@cute.jit
def tile_at(ranges: Ranges, number: Int32, lane: Int32, plan: cutlass.Constexpr) -> Tile:
    """Tile `number`; all lanes of a warp call."""
    first_query = number * plan.tile_queries
    start, end = Int32(0), Int32(0)
    if lane < plan.tile_queries:
        start, end = range_of(ranges, first_query + lane)
    length = end - start
    longest = cute.arch.warp_redux_sync(length, "max")
    first_key = cute.arch.warp_redux_sync(start if length > 0 else Int32(NOWHERE), "min")
    first_key = first_key & ~(plan.keys_aligned - 1)
    last_key = cute.arch.warp_redux_sync(end if length > 0 else Int32(0), "max")
    key_tiles = Int32(0)
    if longest > unscored_length(ranges, plan):
        key_tiles = (last_key - first_key + TILE_KEYS - 1) // TILE_KEYS
    return Tile(first_query, first_key, key_tiles)


@cute.jit
def stretch_of(tile: Tile, plan: cutlass.Constexpr) -> Tile:
    """The keys of a tile that this CTA scores: all, or a stretch of them if CTAs share it. Samples
    are the first key tile and a late one, so that they span scores that rise or fall."""
    stretch = tile
    if cutlass.const_expr(plan.shared):
        part, parts = cute.arch.block_idx_in_cluster(), cute.arch.cluster_size()
        first, end = tile.key_tiles * part // parts, tile.key_tiles * (part + 1) // parts
        late = cutlass.max(late_tile(tile.key_tiles), Int32(0))
        samples = (tile.first_key, tile.first_key + late * TILE_KEYS)
        first_key = tile.first_key + first * TILE_KEYS
        stretch = Tile(tile.first_query, first_key, end - first, samples)
    return stretch


@cute.jit
def first_segment(tile: Tile, plan: cutlass.Constexpr) -> Int32:
    """Key tiles of the first segment: all key tiles, if they are one segment."""
    tiles = tile.key_tiles
    if cutlass.const_expr(not plan.scores_only):
        if tiles > plan.whole // plan.tile_entries:
            tiles = Int32(plan.segment // plan.tile_entries)
    return tiles


@cute.jit
def scores_at(tile: Tile, plan: cutlass.Constexpr) -> Int32:
    """Offset of the segment in a query's words of the workspace: after the log, if it has one."""
    words = Int32(0)
    if tile.key_tiles > plan.whole // plan.tile_entries:
        words = Int32(plan.log + plan.log_chunks * CHUNK)
    return words


@cute.jit
def key_tile_at(tile: Tile, turn: Int32, plan: cutlass.Constexpr) -> Int32:
    """The key tile that is scored in a turn. Odd turns of the first segment begin with a late tile,
    so that the sample of the first two (entries.py) spans scores that rise or fall."""
    key_tile = turn
    if cutlass.const_expr(not plan.scores_only and not plan.shared):
        tiles = first_segment(tile, plan)
        if turn % 2 == 1 and turn < tiles:
            key_tile = turn - 1 + late_tile(tiles)
            if key_tile >= tiles:
                key_tile -= odd_tiles(tiles)
    return key_tile


def late_tile(tiles: Int32) -> Int32:
    """The odd one of `tiles` that is scored first."""
    return (tiles * 3 // 4 - 1) | 1


def odd_tiles(tiles: Int32) -> Int32:
    """Tiles from two past the last odd one of `tiles` back to the first."""
    return tiles & ~1


class Walk(NamedTuple):
    """A warpgroup's path through a segment, where it takes every other turn: `key_tile_at` by
    additions alone."""

    key: Int32  # of the tile, the first one's
    wraps: Int32  # from this key on the next step is another one; unused if CTAs share tiles
    back: Int32  # that one, in keys
    place: Int32  # of the first key's scores, in keys


def first_turn(begin: Int32, plan: Any) -> Int32:
    """First turn of the segment that begins with key tile `begin`. Samples of a tile that CTAs
    share have the turns before 0."""
    return begin - samples_before(begin, plan) if plan.shared else begin


@cute.jit
def samples_before(begin: Int32, plan: cutlass.Constexpr) -> Int32:
    """Samples that are scored before the key tile `begin` of a CTA."""
    return Int32(plan.sample_tiles) if begin == 0 else Int32(0)


@cute.jit
def walk_of(tile: Tile, first: Int32, plan: cutlass.Constexpr) -> Walk:
    """The walk from the turn `first` on."""
    if cutlass.const_expr(plan.shared):
        return shared_walk(tile, first)
    wraps, back = Int32(NOWHERE), Int32(0)
    if cutlass.const_expr(not plan.scores_only and not plan.shared):
        if first == 1:
            tiles = first_segment(tile, plan)
            wraps = (tiles - 2) * TILE_KEYS
            back = (2 - odd_tiles(tiles)) * TILE_KEYS
    key = key_tile_at(tile, first, plan) * TILE_KEYS
    return Walk(key, uniform(wraps), uniform(back), key)


@cute.jit
def shared_walk(tile: Tile, first: Int32) -> Walk:
    """The walk through a stretch, from a sample on if `first` is a turn before 0. A sample's scores
    lie where the same thread stores the next ones."""
    key, place = first * TILE_KEYS, first * TILE_KEYS
    if first < 0:
        place = (first + SAMPLE_TILES) * TILE_KEYS
        at, late = tile.samples
        if first != -SAMPLE_TILES:
            at = late
        key = at - tile.first_key
    return Walk(key, Int32(0), uniform(place - key), place)


@cute.jit
def steps_from(walk: Walk, key: Int32, turn: Int32, plan: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """Keys from one turn's key tile to the next one's, and from its scores to the next ones."""
    step = Int32(2 * TILE_KEYS)
    key_step = step
    if cutlass.const_expr(plan.shared):
        if turn < 0:
            key_step, step = walk.back, Int32(0)
    else:
        if key >= walk.wraps:
            step = walk.back
        key_step = step
    return key_step, step


def unscored_length(ranges: Ranges, plan: Any) -> Any:
    """Rows up to which a query needs no scores: all of them are among the best."""
    topk = ranges.topk * plan.entry_keys if plan.of_blocks else ranges.topk
    return Int32(0) if plan.scores_all else topk


def whole_entries(keys: Any, plan: Any) -> Any:
    """Entries of so many keys, the last one whole."""
    return keys >> (plan.entry_keys.bit_length() - 1) if plan.of_blocks else keys


def some_entries(keys: Any, plan: Any) -> Any:
    """The same; the last one may have fewer keys."""
    return whole_entries(keys + (plan.entry_keys - 1), plan) if plan.of_blocks else keys


def num_tiles(ranges: Ranges, plan: Any) -> Int32:
    """Tiles of all queries."""
    return (ranges.num_queries + plan.tile_queries - 1) // plan.tile_queries


@cute.jit
def tile_number(ranges: Ranges, turn: Int32, plan: cutlass.Constexpr) -> Int32:
    """The tile that this CTA, or its cluster, takes in a turn, negative if none is left. Last
    queries come first, as they see most keys if attention is causal; the order of the CTAs
    alternates from turn to turn."""
    own, count = taker(plan)
    index = own
    if turn % 2 == 1:
        index = count - 1 - own
    return num_tiles(ranges, plan) - 1 - (turn * count + index)


def taker(plan: Any) -> tuple[Int32, Int32]:
    """(number, count) of the CTA, or of the cluster if its CTAs share tiles."""
    number, count = cute.arch.block_idx(), cute.arch.grid_dim()
    if plan.shared:
        number, count = cute.arch.cluster_idx(), cute.arch.cluster_dim()
    return number[0], count[0]


def num_turns(ranges: Ranges, plan: Any) -> Int32:
    """Turns of every CTA."""
    _, count = taker(plan)
    return (num_tiles(ranges, plan) + count - 1) // count


class Listed(NamedTuple):
    """Keys that may be chosen; each is in its query's range."""

    bits: cute.Tensor  # (S, row_words) int32: bit i of word w is of key row 32 w + i
    counts: cute.Tensor  # (S,) int32: ones of each query


class LaneBits(NamedTuple):
    """The bits of a lane's keys."""

    words: Any  # pointer to Int16: of the first WARP_KEYS keys of the tile, for its first query
    apart: Int32  # from there to those for its second query
    own: tuple[Int32, Int32]  # bits of its two keys among those of a warp


@cute.jit
def lane_bits(ranges: Ranges, tile: Tile, lane: Int32, plan: cutlass.Constexpr) -> LaneBits:
    """The calling lane's. A query past the last one has that one's."""
    bits, last = ranges.listed.bits, ranges.num_queries - 1
    halves = 2 * Int32(bits.shape[1])
    query = tile.first_query + lane % QUERY_GROUP
    first, second = cutlass.min(query, last), cutlass.min(query + QUERY_GROUP, last)
    words = cute.recast_ptr(bits.iterator, dtype=Int16)
    words = words + (Int64(first) * halves + tile.first_key // WARP_KEYS)
    own = Int32(1) << lane // QUERY_GROUP
    return LaneBits(words, (second - first) * halves, (own, own << WARP_KEYS // 2))


def load_listed(lane: LaneBits, key: Int32, plan: Any) -> list[Int32]:
    """Load the bits of the warp's keys for each of the lane's queries. key: of the tile, any of the
    warp's."""
    at = lane.words + (key >> WARP_KEYS.bit_length() - 1)
    return [load_half(at), load_half(at + lane.apart)][: plan.groups]


@cute.jit
def number_listed(ranges: Ranges, query: Int32) -> Int32:
    """Keys that a query may choose; 0 past the last query."""
    count = Int32(0)
    if query < ranges.num_queries:
        count = ranges.listed.counts[query]
    return count


@cute.jit
def listed_before(ranges: Ranges, query: Int32, key: Int32, lane: Int32) -> Int32:
    """Keys before the row `key` that a query may choose. All lanes call."""
    bits, ones = ranges.listed.bits, Int32(0)
    words = bits.iterator + Int64(query) * bits.shape[1]
    for word in cutlass.range(lane, key // WARP_SIZE, WARP_SIZE, unroll=4):
        ones += Int32(cute.arch.popc((words + word).load()))
    if lane == 0:
        below = (Int32(1) << key % WARP_SIZE) - 1
        ones += Int32(cute.arch.popc((words + key // WARP_SIZE).load() & below))
    return Int32(cute.arch.warp_redux_sync(ones, "add"))
