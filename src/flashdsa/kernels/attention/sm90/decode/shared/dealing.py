"""Tiles dealt out: each CTA takes as many of a launch, whichever items they are of.

The tiles of all queries lie on a line, query by query, each with OVERHEAD_TILES in front. As many
CTAs as a query has items form a *group*, one an item: they read the same rows side by side. Group c
takes what lies between c and c + 1 times the line's length divided by the groups. A CTA so has a
*stretch* of its items of some neighbouring queries; only its first and its last one may be *parts*,
which are not the whole item. No query is cut if shares of as many whole ones are not longer by more
than WHOLE_TILES. `backends/sm90/decode_cuts.py` says the same in Python.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from flashdsa.dsl.warp import prefix_sum
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.operands import OtherOperands
from flashdsa.kernels.attention.sm90.core.sources import join_slots
from flashdsa.kernels.attention.sm90.decode.shared.context import Context, DecodeMemory
from flashdsa.kernels.attention.sm90.decode.shared.plan import (
    CUT_WORDS,
    DEALT_WORDS,
    LEAST_SHARE,
    OVERHEAD_TILES,
    WHOLE_TILES,
)

LINE_AT, GROUPS_AT, BLOCK_AT, FIRST_AT = range(2 * CUT_WORDS, DEALT_WORDS)
"""Indices after the CTA's two cuts: the line's length, the groups that take part, the number of the
CTA's items among those of their queries, and the CTA that has them in the first group."""


class Batch(NamedTuple):
    """The launch's items."""

    queries: Int32
    blocks: Int32  # items of a query
    most_slots: Int32  # of a query
    lengths: cute.Tensor  # (S,) int32, or (0,): every slot counts
    sources: Any = None  # of a joined plan `Sources`, which say how many slots a query has


class Parts(NamedTuple):
    """Parts of an item: neighbouring CTAs take one each."""

    first: Int32  # CTA that takes the item's first part
    count: Int32


def batch_of(memory: DecodeMemory, x: OtherOperands, sources: Any) -> Batch:
    """The launch's items; sources: of a joined plan `Sources`, else None."""
    rows = memory.plan.group_heads
    queries, heads = x.lse.shape
    blocks = (Int32(heads) + rows - 1) // rows
    return Batch(Int32(queries), blocks, Int32(x.indices.shape[1]), x.topk_length, sources)


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
    elif thread < 2:
        # A thread a cut.
        tiles = (batch.most_slots + keys - 1) // keys
        size = tiles + OVERHEAD_TILES
        line = batch.queries * size
        group = group_of_cta(batch)
        write_end(memory, batch, group, line, thread)
        place = place_of_cut(group, line, thread)
        whole = (batch.queries + group.count - 1) // group.count
        if stays_whole(group, line, whole * size):
            place = cutlass.min((group.number + thread) * whole * size, line)
        if place < line:
            write_cut(memory, thread, place, Int32(0), Int32(0), tiles)
    cute.arch.sync_threads()


@cute.jit
def deal_by_lengths(memory: DecodeMemory, batch: Batch, thread: Int32) -> None:
    """Deal by the queries' slots: each thread adds up neighbouring queries, those of a group if
    they stay whole, and all threads' sums together are the line."""
    group = group_of_cta(batch)
    takers = cutlass.min(group.count, Int32(memory.plan.threads))
    each = (batch.queries + (takers - 1)) // takers
    first = cutlass.min(thread * each, batch.queries)
    end = cutlass.min(first + each, batch.queries)
    own, at, line = Int32(0), Int32(0), Int32(0)
    # The first turn adds up, the second one finds cuts: one code, as code that runs once costs
    # most.
    for turn in cutlass.range(2, unroll=1):
        for query in cutlass.range(first, end, unroll=1):
            room = room_of_query(memory, batch, query)
            if turn == 0:
                own += room
            else:
                for side in cutlass.range(2, unroll=1):
                    place = place_of_cut(group, line, side)
                    if place >= at and place < at + room:
                        write_cut(memory, side, place, at, query, room - OVERHEAD_TILES)
                at += room
        if turn == 0:
            at, line, longest = add_before(memory, own, thread)
            if thread < 2:
                write_end(memory, batch, group, line, thread)
            # The thread that has a cut's query writes over the end.
            cute.arch.sync_threads()
            if stays_whole(group, line, longest):
                if thread < 2:
                    cut = cutlass.min((group.number + thread) * each, batch.queries)
                    memory.dealt.array(Int32, DEALT_WORDS)[CUT_WORDS * thread] = cut
                end = first


@cute.jit
def room_of_query(memory: DecodeMemory, batch: Batch, query: Int32) -> Int32:
    """Tiles of the line that a query takes."""
    keys = memory.plan.tile.keys
    return (count_slots(batch, query, keys) + keys - 1) // keys + OVERHEAD_TILES


@cute.jit
def add_before(memory: DecodeMemory, own: Int32, thread: Int32) -> tuple[Int32, Int32, Int32]:
    """(the sum over the threads before this one, the sum over all, the largest). Syncs all
    threads."""
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    warps = memory.plan.threads // WARP_SIZE
    upto, most = prefix_sum(own, lane), Int32(cute.arch.warp_redux_sync(own, "max"))
    sums = memory.dealt.array(Int32, DEALT_WORDS + 2 * warps)
    if lane == WARP_SIZE - 1:
        sums[DEALT_WORDS + warp] = upto
        sums[DEALT_WORDS + warps + warp] = most
    cute.arch.sync_threads()
    before, line, longest = upto - own, Int32(0), Int32(0)
    for other in cutlass.range_constexpr(warps):
        of_warp = sums[DEALT_WORDS + other]
        line += of_warp
        longest = cutlass.max(longest, sums[DEALT_WORDS + warps + other])
        if other < warp:
            before += of_warp
    return before, line, longest


class Group(NamedTuple):
    """The CTA's place among the launch's CTAs: those of the first items of all groups, then those
    of the second ones, ..."""

    number: Int32  # `count` of a CTA without a group
    count: Int32  # of groups
    block: Int32  # the number of its items among those of their queries


@cute.jit
def group_of_cta(batch: Batch) -> Group:
    """The CTA's group."""
    num_ctas, _, _ = cute.arch.grid_dim()
    number, _, _ = cute.arch.block_idx()
    count, block = Int32(num_ctas), Int32(0)
    if batch.blocks > 1:
        count = count // batch.blocks
        block = number // count
        number = number - block * count
        if block >= batch.blocks:
            number = count
    return Group(number, count, block)


def stays_whole(group: Group, line: Any, longest: Any) -> Boolean:
    """Whether no query is cut, as the longest share of whole ones is little more than each other
    group's part of the line."""
    return Boolean(longest * group.count <= line + WHOLE_TILES * group.count)


def groups_of_line(group: Group, line: Any) -> Any:
    """Groups that take part: all, unless the line is short."""
    return cutlass.max(cutlass.min(line // LEAST_SHARE, group.count), Int32(1))


def place_of_cut(group: Group, line: Any, side: Any) -> Any:
    """Position on the line of the CTA's first cut, or of its second one; the line's length for a
    CTA that takes no part."""
    groups = groups_of_line(group, line)
    return cutlass.min(group.number + side, groups) * line // groups


@cute.jit
def write_end(memory: DecodeMemory, batch: Batch, group: Group, line: Any, side: Any) -> None:
    """Write a cut as if it were at the line's end; with the first one, the words behind both."""
    dealt = memory.dealt.array(Int32, DEALT_WORDS)
    dealt[CUT_WORDS * side] = batch.queries
    dealt[CUT_WORDS * side + 1] = Int32(0)
    dealt[CUT_WORDS * side + 2] = line
    if side == 0:
        dealt[LINE_AT] = line
        dealt[GROUPS_AT] = groups_of_line(group, line)
        dealt[BLOCK_AT] = group.block
        dealt[FIRST_AT] = group.block * group.count


@cute.jit
def write_cut(
    memory: DecodeMemory,
    side: Int32,
    place: Int32,
    start: Int32,
    query: Int32,
    tiles: Int32,
) -> None:
    """Write a cut at a position among neighbouring queries of `tiles` tiles, the first of which is
    `query` and begins at `start`."""
    dealt = memory.dealt.array(Int32, DEALT_WORDS)
    size = tiles + OVERHEAD_TILES
    number = (place - start) // size
    start, query = start + number * size, query + number
    tile = cutlass.max(place - start - OVERHEAD_TILES, Int32(0))
    dealt[CUT_WORDS * side] = query
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
    query = dealt[0] + number
    joined: Any = None
    if cutlass.const_expr(batch.sources is not None):
        joined = join_slots(batch.sources, query, keys)
        num_slots = joined.end
    else:
        num_slots = count_slots(batch, query, keys)
    first, end = Int32(0), (num_slots + keys - 1) // keys
    if number == 0:
        first = dealt[1]
    if query == dealt[CUT_WORDS]:
        end = dealt[CUT_WORDS + 1]
    return Context(
        memory,
        query,
        dealt[BLOCK_AT] * rows,
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
    line, groups = dealt[LINE_AT], dealt[GROUPS_AT]
    # Cut c is at c * line // groups, so it is not before y if c >= y * groups / line, rounded up.
    first_cut = ((start + 1) * groups + line - 1) // line
    end_cut = (end * groups + line - 1) // line
    return Parts(dealt[FIRST_AT] + first_cut - 1, end_cut - first_cut + 1)
