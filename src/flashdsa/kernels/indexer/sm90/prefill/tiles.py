"""Tiles of neighbouring queries: their assignment to CTAs, and the keys that they need."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.warp import uniform
from flashdsa.kernels.indexer.sm90.prefill import plan as sizes

NOWHERE = 0x7FFFFFFF
"""The start of an empty range."""


class Ranges(NamedTuple):
    """Key rows that each query sees, clamped to [0, num_keys)."""

    starts: cute.Tensor  # (S,) int32, or (0,): all start at row 0
    ends: cute.Tensor  # (S,) int32
    num_keys: Int32
    topk: Int32  # keys up to which a query's are not scored
    parts: Any = None  # Int32, of the scores alone: CTAs among which a tile's keys are divided

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
    first_key = first_key & ~(sizes.SCALES_ALIGNED - 1)
    last_key = cute.arch.warp_redux_sync(end if length > 0 else Int32(0), "max")
    key_tiles = Int32(0)
    if longest > ranges.topk:  # others have all their rows among the best
        key_tiles = (last_key - first_key + sizes.TILE_KEYS - 1) // sizes.TILE_KEYS
    return Tile(first_query, first_key, key_tiles)


@cute.jit
def stretch_of(ranges: Ranges, tile: Tile, turn: Int32, plan: cutlass.Constexpr) -> Tile:
    """The keys of a turn's tile that this CTA scores: all, or a stretch of them if CTAs share it.
    Samples are the first key tile and a late one, so that they span scores that rise or fall."""
    stretch = tile
    if cutlass.const_expr(plan.scores_only):
        first, end = part_of(tile, item_of(turn, plan) % ranges.parts, ranges.parts)
        stretch = Tile(tile.first_query, tile.first_key + first * sizes.TILE_KEYS, end - first)
    if cutlass.const_expr(plan.shared):
        first, end = part_of(tile, cute.arch.block_idx_in_cluster(), cute.arch.cluster_size())
        late = cutlass.max(late_tile(tile.key_tiles), Int32(0))
        samples = (tile.first_key, tile.first_key + late * sizes.TILE_KEYS)
        first_key = tile.first_key + first * sizes.TILE_KEYS
        stretch = Tile(tile.first_query, first_key, end - first, samples)
    return stretch


def part_of(tile: Tile, part: Int32, parts: Int32) -> tuple[Int32, Int32]:
    """(first, one past the last) key tile of an equal part."""
    return tile.key_tiles * part // parts, tile.key_tiles * (part + 1) // parts


@cute.jit
def first_segment(tile: Tile, plan: cutlass.Constexpr) -> Int32:
    """Key tiles of the first segment: all key tiles, if they are one segment."""
    tiles = tile.key_tiles
    if cutlass.const_expr(not plan.scores_only):
        if tiles > plan.whole // sizes.TILE_KEYS:
            tiles = Int32(plan.segment // sizes.TILE_KEYS)
    return tiles


@cute.jit
def scores_at(tile: Tile, plan: cutlass.Constexpr) -> Int32:
    """Offset of the segment in a query's words of the workspace: after the log, if it has one."""
    words = Int32(0)
    if tile.key_tiles > plan.whole // sizes.TILE_KEYS:
        words = Int32(plan.log + plan.log_chunks * sizes.CHUNK)
    return words


@cute.jit
def key_tile_at(tile: Tile, turn: Int32, plan: cutlass.Constexpr) -> Int32:
    """The key tile that is scored in a turn. Odd turns of the first segment begin with a late tile,
    so that the sample of the first two (teams.py) spans scores that rise or fall."""
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
            wraps = (tiles - 2) * sizes.TILE_KEYS
            back = (2 - odd_tiles(tiles)) * sizes.TILE_KEYS
    key = key_tile_at(tile, first, plan) * sizes.TILE_KEYS
    return Walk(key, uniform(wraps), uniform(back), key)


@cute.jit
def shared_walk(tile: Tile, first: Int32) -> Walk:
    """The walk through a stretch, from a sample on if `first` is a turn before 0. A sample's scores
    lie where the same thread stores the next ones."""
    key, place = first * sizes.TILE_KEYS, first * sizes.TILE_KEYS
    if first < 0:
        place = (first + sizes.SAMPLE_TILES) * sizes.TILE_KEYS
        at, late = tile.samples
        if first != -sizes.SAMPLE_TILES:
            at = late
        key = at - tile.first_key
    return Walk(key, Int32(0), uniform(place - key), place)


@cute.jit
def steps_from(walk: Walk, key: Int32, turn: Int32, plan: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """Keys from one turn's key tile to the next one's, and from its scores to the next ones."""
    step = Int32(2 * sizes.TILE_KEYS)
    key_step = step
    if cutlass.const_expr(plan.shared):
        if turn < 0:
            key_step, step = walk.back, Int32(0)
    else:
        if key >= walk.wraps:
            step = walk.back
        key_step = step
    return key_step, step


def entries_of(keys: Any, plan: Any) -> Any:
    """Entries of so many keys, a multiple of an entry's."""
    return keys >> (plan.entry_keys.bit_length() - 1) if plan.of_blocks else keys


def row_scores(ranges: Ranges, plan: Any) -> Int32:
    """Scores of a query in device memory, of the scores alone."""
    return entries_of(ranges.num_keys + (plan.entry_keys - 1), plan)


def num_tiles(ranges: Ranges, plan: Any) -> Int32:
    """Tiles of all queries."""
    return (ranges.num_queries + plan.tile_queries - 1) // plan.tile_queries


@cute.jit
def tile_number(ranges: Ranges, turn: Int32, plan: cutlass.Constexpr) -> Int32:
    """The tile that this CTA, or its cluster, takes in a turn, negative if none is left. Last
    queries come first, as they see most keys if attention is causal; the order of the CTAs
    alternates from turn to turn."""
    item = item_of(turn, plan)
    if cutlass.const_expr(plan.scores_only):
        item = item // ranges.parts
    return num_tiles(ranges, plan) - 1 - item


@cute.jit
def item_of(turn: Int32, plan: cutlass.Constexpr) -> Int32:
    """The tile, or part of one, that this CTA or its cluster takes in a turn, from the last on."""
    own, count = taker(plan)
    index = own
    if turn % 2 == 1:
        index = count - 1 - own
    return turn * count + index


def taker(plan: Any) -> tuple[Int32, Int32]:
    """(number, count) of the CTA, or of the cluster if its CTAs share tiles."""
    number, count = cute.arch.block_idx(), cute.arch.grid_dim()
    if plan.shared:
        number, count = cute.arch.cluster_idx(), cute.arch.cluster_dim()
    return number[0], count[0]


def num_turns(ranges: Ranges, plan: Any) -> Int32:
    """Turns of every CTA."""
    _, count = taker(plan)
    items = num_tiles(ranges, plan)
    if plan.scores_only:
        items = items * ranges.parts
    return (items + count - 1) // count
