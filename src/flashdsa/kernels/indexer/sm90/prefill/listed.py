"""Keys among which a query chooses, as bits in device memory: their loads while keys are scored."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int16, Int32, Int64, cute

from flashdsa.dsl.gmem import load_half
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.sm90.prefill.plan import QUERY_GROUP, WARP_KEYS
from flashdsa.kernels.indexer.sm90.prefill.tiles import Ranges, Tile


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
