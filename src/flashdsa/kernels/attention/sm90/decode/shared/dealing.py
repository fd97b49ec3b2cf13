"""Tiles dealt out: each CTA takes as many of a launch, whichever items they are of.

The tiles of all items lie on a line, item by item, each with OVERHEAD_TILES in front. CTA c takes
what lies between c and c + 1 times the line's length divided by the CTAs. It so has a *stretch* of
each of some neighbouring items; only its first and its last one may be *parts*, which are not the
whole item. `backends/sm90/decode_cuts.py` says the same in Python.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from flashdsa.dsl.warp import prefix_sum
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.sources import join_slots
from flashdsa.kernels.attention.sm90.decode.shared.context import Context, DecodeMemory
from flashdsa.kernels.attention.sm90.decode.shared.plan import (
    CUT_WORDS,
    DEALT_WORDS,
    LEAST_PART,
    LEAST_SHARE,
    OVERHEAD_TILES,
)

LINE_AT = 2 * CUT_WORDS
"""Index of the line's length, after the CTA's two cuts; the CTAs that take part follow it."""


class Batch(NamedTuple):
    """The launch's items: those of a query are neighbours."""

    queries: Int32
    blocks: Int32  # items of a query
    most_slots: Int32  # of a query
    lengths: cute.Tensor  # (S,) int32, or (0,): every slot counts
    sources: Any = None  # of a joined plan `Sources`, which say how many slots a query has


class Parts(NamedTuple):
    """Parts of an item: neighbouring CTAs take one each."""

    first: Int32  # CTA that takes the item's first part
    count: Int32


def batch_of(
    memory: DecodeMemory,
    lse: cute.Tensor,
    indices: cute.Tensor,
    lengths: cute.Tensor,
    sources: Any = None,
) -> Batch:
    """The launch's items, by its tensors: (S, H), (S, topk), (S,) or (0,); `sources`: of a joined
    plan."""
    rows = memory.plan.group_heads
    blocks = (Int32(lse.shape[1]) + rows - 1) // rows
    return Batch(Int32(lse.shape[0]), blocks, Int32(indices.shape[1]), lengths, sources)


@cute.jit
def count_slots(batch: Batch, query: Int32, keys: cutlass.Constexpr) -> Int32:
    """Slots of a query that may be valid; `keys`: of a tile."""
    if cutlass.const_expr(batch.sources is not None):
        return join_slots(batch.sources, query, keys).end
    count = batch.most_slots
    if batch.lengths.shape[0] > 0:
        given = (batch.lengths.iterator + query).load()
        count = cutlass.min(cutlass.max(given, Int32(0)), count)
    return count


@cute.jit
def deal(memory: DecodeMemory, batch: Batch, thread: Int32) -> None:
    """All threads of the CTA: write the CTA's two cuts. Ends synced."""
    keys = memory.plan.tile.keys
    if cutlass.const_expr(batch.sources is not None) or batch.lengths.shape[0] > 0:
        deal_by_lengths(memory, batch, thread)
    elif thread == 0:
        # As if all items were of one query.
        tiles = (batch.most_slots + keys - 1) // keys
        items = batch.queries * batch.blocks
        line = items * (tiles + OVERHEAD_TILES)
        write_ends(memory, items, line)
        for side in cutlass.range_constexpr(2):
            place = place_of_cut(line, side)
            if place < line:
                write_cut(memory, side, place, Int32(0), Int32(0), tiles)
    cute.arch.sync_threads()


@cute.jit
def deal_by_lengths(memory: DecodeMemory, batch: Batch, thread: Int32) -> None:
    """Deal by the queries' slots: each thread adds up neighbouring queries, and all threads' sums
    together are the line."""
    threads = memory.plan.threads
    each = (batch.queries + (threads - 1)) // threads
    first = cutlass.min(thread * each, batch.queries)
    end = cutlass.min(first + each, batch.queries)
    own = Int32(0)
    for query in cutlass.range(first, end, unroll=1):
        own += room_of_query(memory, batch, query)
    before, line = add_before(memory, own, thread)
    if thread == 0:
        write_ends(memory, batch.queries * batch.blocks, line)
    # The thread that has a cut's item writes over the ends.
    cute.arch.sync_threads()
    for side in cutlass.range_constexpr(2):
        place = place_of_cut(line, side)
        if place >= before and place < before + own:
            at = before
            for query in cutlass.range(first, end, unroll=1):
                room = room_of_query(memory, batch, query)
                if place >= at and place < at + room:
                    tiles = room // batch.blocks - OVERHEAD_TILES
                    write_cut(memory, side, place, at, query * batch.blocks, tiles)
                at += room


@cute.jit
def room_of_query(memory: DecodeMemory, batch: Batch, query: Int32) -> Int32:
    """Tiles of the line that a query's items take."""
    keys = memory.plan.tile.keys
    tiles = (count_slots(batch, query, keys) + keys - 1) // keys
    return batch.blocks * (tiles + OVERHEAD_TILES)


@cute.jit
def add_before(memory: DecodeMemory, own: Int32, thread: Int32) -> tuple[Int32, Int32]:
    """(the sum over the threads before this one, the sum over all). Syncs all threads."""
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    warps = memory.plan.threads // WARP_SIZE
    upto = prefix_sum(own, lane)
    sums = memory.dealt.array(Int32, DEALT_WORDS + warps)
    if lane == WARP_SIZE - 1:
        sums[DEALT_WORDS + warp] = upto
    cute.arch.sync_threads()
    before, line = upto - own, Int32(0)
    for other in cutlass.range_constexpr(warps):
        of_warp = sums[DEALT_WORDS + other]
        line += of_warp
        if other < warp:
            before += of_warp
    return before, line


def ctas_of_line(line: Any) -> Any:
    """CTAs that take part: all, unless the line is short."""
    num_ctas, _, _ = cute.arch.grid_dim()
    return cutlass.max(cutlass.min(line // LEAST_SHARE, Int32(num_ctas)), Int32(1))


def place_of_cut(line: Any, side: int) -> Any:
    """Position on the line of the CTA's first cut, or of its second one; the line's length for a
    CTA that takes no part."""
    cta, _, _ = cute.arch.block_idx()
    ctas = ctas_of_line(line)
    return cutlass.min(cta + side, ctas) * line // ctas


def write_ends(memory: DecodeMemory, items: Any, line: Any) -> None:
    """Write the line's length, and both cuts as if they were at its end."""
    dealt = memory.dealt.array(Int32, DEALT_WORDS)
    for side in range(2):
        dealt[CUT_WORDS * side] = items
        dealt[CUT_WORDS * side + 1] = Int32(0)
        dealt[CUT_WORDS * side + 2] = line
    dealt[LINE_AT] = line
    dealt[LINE_AT + 1] = ctas_of_line(line)


@cute.jit
def write_cut(
    memory: DecodeMemory,
    side: cutlass.Constexpr,
    place: Int32,
    start: Int32,
    item: Int32,
    tiles: Int32,
) -> None:
    """Write a cut at a position among neighbouring items of `tiles` tiles, the first of which is
    `item` and begins at `start`."""
    dealt = memory.dealt.array(Int32, DEALT_WORDS)
    size = tiles + OVERHEAD_TILES
    number = (place - start) // size
    start, item = start + number * size, item + number
    tile = place - start - OVERHEAD_TILES
    if tiles - tile < LEAST_PART and tile >= LEAST_PART:
        tile, start, item = Int32(0), start + size, item + 1
    if tile < LEAST_PART:
        tile = Int32(0)
    dealt[CUT_WORDS * side] = item
    dealt[CUT_WORDS * side + 1] = tile
    dealt[CUT_WORDS * side + 2] = start


def num_stretches(memory: DecodeMemory) -> Any:
    """Stretches of the CTA."""
    dealt = memory.dealt.array(Int32, DEALT_WORDS)
    return dealt[CUT_WORDS] - dealt[0] + cutlass.min(dealt[CUT_WORDS + 1], Int32(1))


@cute.jit
def take_stretch(memory: DecodeMemory, batch: Batch, number: Int32) -> Context:
    """The CTA's stretch of that number as a context, as if the CTA were alone in its cluster."""
    dealt = memory.dealt.array(Int32, DEALT_WORDS)
    thread, _, _ = cute.arch.thread_idx()
    keys, rows = memory.plan.tile.keys, memory.plan.group_heads
    item = dealt[0] + number
    query = item // batch.blocks
    joined: Any = None
    if cutlass.const_expr(batch.sources is not None):
        joined = join_slots(batch.sources, query, keys)
        num_slots = joined.end
    else:
        num_slots = count_slots(batch, query, keys)
    first, end = Int32(0), (num_slots + keys - 1) // keys
    if number == 0:
        first = dealt[1]
    if item == dealt[CUT_WORDS]:
        end = dealt[CUT_WORDS + 1]
    return Context(
        memory,
        query,
        (item - query * batch.blocks) * rows,
        Int32(0),
        Int32(1),
        first * keys,
        cutlass.min(end * keys, num_slots),
        end - first,
        thread % WARPGROUP_SIZE,
        joined,
    )


@cute.jit
def tiles_of_item(ctx: Context, batch: Batch) -> Int32:
    """Tiles of the item of which `ctx` is a stretch."""
    keys = ctx.plan.tile.keys
    return (count_slots(batch, ctx.query, keys) + keys - 1) // keys


@cute.jit
def is_part(ctx: Context, batch: Batch) -> Boolean:
    """Whether other CTAs have stretches of the item of which `ctx` is one."""
    return Boolean(ctx.num_tiles != tiles_of_item(ctx, batch))


@cute.jit
def parts_before(ctx: Context, number: Int32) -> Int32:
    """Parts that the CTA has stored before its last stretch, which has that number: its first one,
    if that was a part."""
    before = Int32(0)
    if number > 0 and ctx.memory.dealt.array(Int32, DEALT_WORDS)[1] > 0:
        before = Int32(1)
    return before


@cute.jit
def parts_of_item(ctx: Context, batch: Batch, number: Int32) -> Parts:
    """Parts of the item of which `ctx` is one.

    Args:
        ctx: the CTA's stretch of that number, its first or its last one.
    """
    dealt = ctx.memory.dealt.array(Int32, DEALT_WORDS)
    start = dealt[2]
    if dealt[0] + number == dealt[CUT_WORDS]:
        start = dealt[CUT_WORDS + 2]
    start += OVERHEAD_TILES
    end = start + tiles_of_item(ctx, batch)
    line, ctas = dealt[LINE_AT], dealt[LINE_AT + 1]
    # Cut c is at c * line // ctas, so it is not before y if c >= y * ctas / line, rounded up.
    first_cut = ((start + LEAST_PART) * ctas + line - 1) // line
    end_cut = ((end - LEAST_PART + 1) * ctas + line - 1) // line
    return Parts(first_cut - 1, end_cut - first_cut + 1)
