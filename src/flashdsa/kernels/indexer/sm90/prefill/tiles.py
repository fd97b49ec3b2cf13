"""Tiles of neighbouring queries: their assignment to CTAs, and the keys that they need."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.warp import uniform
from flashdsa.kernels.indexer.sm90.prefill.plan import CHUNK, TILE_KEYS

NOWHERE = 0x7FFFFFFF
"""The start of an empty range."""
SCALES_ALIGNED = 4
"""A tile's first key is a multiple of it: TMA brings scales by 16 bytes."""


class Ranges(NamedTuple):
    """Key rows that each query sees, clamped to [0, num_keys)."""

    starts: cute.Tensor  # (S,) int32, or (0,): all start at row 0
    ends: cute.Tensor  # (S,) int32
    num_keys: Int32
    topk: Int32

    @property
    def num_queries(self) -> Int32:
        """S."""
        return Int32(self.ends.shape[0])


class Tile(NamedTuple):
    """A tile of queries. None of them needs scores if it has no key tiles."""

    first_query: Int32
    first_key: Int32
    key_tiles: Int32


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
    first_key = first_key & ~(SCALES_ALIGNED - 1)
    last_key = cute.arch.warp_redux_sync(end if length > 0 else Int32(0), "max")
    key_tiles = Int32(0)
    if longest > unscored_length(ranges, plan):
        key_tiles = (last_key - first_key + TILE_KEYS - 1) // TILE_KEYS
    return Tile(first_query, first_key, key_tiles)


@cute.jit
def first_segment(tile: Tile, plan: cutlass.Constexpr) -> Int32:
    """Key tiles of the first segment: all key tiles, if they are one segment."""
    tiles = tile.key_tiles
    if cutlass.const_expr(not plan.scores_only):
        if tiles > plan.whole // TILE_KEYS:
            tiles = Int32(plan.segment // TILE_KEYS)
    return tiles


@cute.jit
def scores_at(tile: Tile, plan: cutlass.Constexpr) -> Int32:
    """Offset of the segment in a query's words of the workspace: after the log, if it has one."""
    words = Int32(0)
    if tile.key_tiles > plan.whole // TILE_KEYS:
        words = Int32(plan.log + plan.log_chunks * CHUNK)
    return words


@cute.jit
def key_tile_at(tile: Tile, turn: Int32, plan: cutlass.Constexpr) -> Int32:
    """The key tile that is scored in a turn. Odd turns of the first segment begin with a late tile,
    so that the sample of the first two (window.py) spans scores that rise or fall."""
    key_tile = turn
    if cutlass.const_expr(not plan.scores_only):
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
    wraps: Int32  # from this key on the next step is another one
    back: Int32  # that one, in keys


@cute.jit
def walk_of(tile: Tile, first: Int32, plan: cutlass.Constexpr) -> Walk:
    """The walk from the turn `first` on."""
    wraps, back = Int32(NOWHERE), Int32(0)
    if cutlass.const_expr(not plan.scores_only):
        if first == 1:
            tiles = first_segment(tile, plan)
            wraps = (tiles - 2) * TILE_KEYS
            back = (2 - odd_tiles(tiles)) * TILE_KEYS
    return Walk(key_tile_at(tile, first, plan) * TILE_KEYS, uniform(wraps), uniform(back))


@cute.jit
def step_from(walk: Walk, key: Int32) -> Int32:
    """Keys from one turn's key tile to the next one's."""
    step = Int32(2 * TILE_KEYS)
    if key >= walk.wraps:
        step = walk.back
    return step


def unscored_length(ranges: Ranges, plan: Any) -> Any:
    """Rows up to which a query needs no scores: all of them are among the best."""
    return Int32(0) if plan.scores_only or plan.with_scores else ranges.topk


def num_tiles(ranges: Ranges, plan: Any) -> Int32:
    """Tiles of all queries."""
    return (ranges.num_queries + plan.tile_queries - 1) // plan.tile_queries


@cute.jit
def tile_number(ranges: Ranges, turn: Int32, plan: cutlass.Constexpr) -> Int32:
    """The tile that this CTA takes in a turn, negative if none is left. Last queries come first,
    as they see most keys if attention is causal; the order of the CTAs alternates from turn to
    turn."""
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    index = cta
    if turn % 2 == 1:
        index = num_ctas - 1 - cta
    return num_tiles(ranges, plan) - 1 - (turn * num_ctas + index)


def num_turns(ranges: Ranges, plan: Any) -> Int32:
    """Turns of every CTA."""
    num_ctas, _, _ = cute.arch.grid_dim()
    return (num_tiles(ranges, plan) + num_ctas - 1) // num_ctas
