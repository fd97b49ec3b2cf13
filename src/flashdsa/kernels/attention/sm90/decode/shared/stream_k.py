"""Stream-K: each CTA takes as many of a launch, whichever items they are of.

The tiles of all queries lie on a line, query by query, each with OVERHEAD_TILES in front. As many
CTAs as a query has items form a *group*, one an item: they read the same rows side by side. Group c
takes what lies between c and c + 1 times the line's length divided by the groups. A CTA so has a
*stretch* of its items of some neighbouring queries; only its first and its last one may be *parts*,
which are not the whole item. No query is cut if shares of as many whole ones are not longer by more
than WHOLE_TILES. `backends/sm90/decode_cuts.py` says the same in Python.

Parts of an item that several CTAs share: slots in device memory, and tickets.

A CTA stores its part, O in f16 divided by its own sums and its statistics, in one of its two slots
of the workspace. Then it draws a ticket from the item's counter. Whoever draws the last one sees
all parts and merges them in their order, its own part too as it is in its slot, so that it does not
matter who it is. Nobody waits for another CTA.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from flashdsa.dsl import gmem, ptx, smem
from flashdsa.dsl.fragments import F16_KIND, pack
from flashdsa.dsl.memory import Memory
from flashdsa.dsl.warp import prefix_sum
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.operands import Operands
from flashdsa.kernels.attention.sm90.core.sources import join_slots
from flashdsa.kernels.attention.sm90.decode.shared import plan
from flashdsa.kernels.attention.sm90.decode.shared.context import Context
from flashdsa.kernels.attention.sm90.decode.shared.words import from_f16, load_words_again

LINE_AT, GROUPS_AT, BLOCK_AT, FIRST_AT = range(2 * plan.CUT_WORDS, plan.STREAM_K_WORDS)
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


def batch_of(memory: Memory, x: Operands, sources: Any) -> Batch:
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
def divide(memory: Memory, batch: Batch, thread: Int32) -> None:
    """All threads of the CTA: write the CTA's two cuts. Ends synced."""
    keys = memory.plan.tile.keys
    if cutlass.const_expr(batch.sources is not None) or batch.lengths.shape[0] > 0:
        divide_by_lengths(memory, batch, thread)
    elif thread < 2:
        # A thread a cut.
        tiles = (batch.most_slots + keys - 1) // keys
        size = tiles + plan.OVERHEAD_TILES
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
def divide_by_lengths(memory: Memory, batch: Batch, thread: Int32) -> None:
    """Divide by the queries' slots: each thread adds up neighbouring queries, those of a group if
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
                        write_cut(memory, side, place, at, query, room - plan.OVERHEAD_TILES)
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
                    memory.stream_k.array(Int32, plan.STREAM_K_WORDS)[plan.CUT_WORDS * thread] = cut
                end = first


@cute.jit
def room_of_query(memory: Memory, batch: Batch, query: Int32) -> Int32:
    """Tiles of the line that a query takes."""
    keys = memory.plan.tile.keys
    return (count_slots(batch, query, keys) + keys - 1) // keys + plan.OVERHEAD_TILES


@cute.jit
def add_before(memory: Memory, own: Int32, thread: Int32) -> tuple[Int32, Int32, Int32]:
    """(sum over the threads before this one, sum over all, the largest). Syncs all threads."""
    lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
    warps = memory.plan.threads // WARP_SIZE
    upto, most = prefix_sum(own, lane), Int32(cute.arch.warp_redux_sync(own, "max"))
    sums = memory.stream_k.array(Int32, plan.STREAM_K_WORDS + 2 * warps)
    if lane == WARP_SIZE - 1:
        sums[plan.STREAM_K_WORDS + warp] = upto
        sums[plan.STREAM_K_WORDS + warps + warp] = most
    cute.arch.sync_threads()
    before, line, longest = upto - own, Int32(0), Int32(0)
    for other in cutlass.range_constexpr(warps):
        of_warp = sums[plan.STREAM_K_WORDS + other]
        line += of_warp
        longest = cutlass.max(longest, sums[plan.STREAM_K_WORDS + warps + other])
        if other < warp:
            before += of_warp
    return before, line, longest


class Group(NamedTuple):
    """The CTA's place in the launch: the CTAs of all groups' first items come first, and so on."""

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
    return Boolean(longest * group.count <= line + plan.WHOLE_TILES * group.count)


def groups_of_line(group: Group, line: Any) -> Any:
    """Groups that take part: all, unless the line is short."""
    return cutlass.max(cutlass.min(line // plan.LEAST_SHARE, group.count), Int32(1))


def place_of_cut(group: Group, line: Any, side: Any) -> Any:
    """The line's position of the CTA's first or second cut; its length: the CTA takes no part."""
    groups = groups_of_line(group, line)
    return cutlass.min(group.number + side, groups) * line // groups


@cute.jit
def write_end(memory: Memory, batch: Batch, group: Group, line: Any, side: Any) -> None:
    """Write a cut as if it were at the line's end; with the first one, the words behind both."""
    cuts = memory.stream_k.array(Int32, plan.STREAM_K_WORDS)
    cuts[plan.CUT_WORDS * side] = batch.queries
    cuts[plan.CUT_WORDS * side + 1] = Int32(0)
    cuts[plan.CUT_WORDS * side + 2] = line
    if side == 0:
        cuts[LINE_AT] = line
        cuts[GROUPS_AT] = groups_of_line(group, line)
        cuts[BLOCK_AT] = group.block
        cuts[FIRST_AT] = group.block * group.count


@cute.jit
def write_cut(
    memory: Memory, side: Int32, place: Int32, start: Int32, query: Int32, tiles: Int32
) -> None:
    """Write a cut at a position among neighbouring queries of `tiles` tiles, the first of which is
    `query` and begins at `start`."""
    cuts = memory.stream_k.array(Int32, plan.STREAM_K_WORDS)
    size = tiles + plan.OVERHEAD_TILES
    number = (place - start) // size
    start, query = start + number * size, query + number
    tile = cutlass.max(place - start - plan.OVERHEAD_TILES, Int32(0))
    cuts[plan.CUT_WORDS * side] = query
    cuts[plan.CUT_WORDS * side + 1] = tile
    cuts[plan.CUT_WORDS * side + 2] = start


def num_stretches(memory: Memory) -> Any:
    """Stretches of the CTA."""
    cuts = memory.stream_k.array(Int32, plan.STREAM_K_WORDS)
    return cuts[plan.CUT_WORDS] - cuts[0] + cutlass.min(cuts[plan.CUT_WORDS + 1], Int32(1))


@cute.jit
def take_stretch(memory: Memory, batch: Batch, number: Int32) -> Context:
    """The CTA's stretch of that number as a context, as if the CTA were alone in its cluster."""
    cuts = memory.stream_k.array(Int32, plan.STREAM_K_WORDS)
    thread, _, _ = cute.arch.thread_idx()
    keys, rows = memory.plan.tile.keys, memory.plan.group_heads
    query = cuts[0] + number
    joined: Any = None
    if cutlass.const_expr(batch.sources is not None):
        joined = join_slots(batch.sources, query, keys)
        num_slots = joined.end
    else:
        num_slots = count_slots(batch, query, keys)
    first, end = Int32(0), (num_slots + keys - 1) // keys
    if number == 0:
        first = cuts[1]
    if query == cuts[plan.CUT_WORDS]:
        end = cuts[plan.CUT_WORDS + 1]
    item = query, cuts[BLOCK_AT] * rows, Int32(0), Int32(1)
    slots = first * keys, cutlass.min(end * keys, num_slots), end - first
    return Context(memory, *item, *slots, thread % WARPGROUP_SIZE, joined)


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
    """Parts that the CTA has stored before its last stretch `number`: its first one, or none."""
    before = Int32(0)
    if number > 0 and ctx.memory.stream_k.array(Int32, plan.STREAM_K_WORDS)[1] > 0:
        before = Int32(1)
    return before


@cute.jit
def parts_of_item(ctx: Context, batch: Batch, number: Int32) -> Parts:
    """Parts of the item of which `ctx`, the CTA's first stretch or its last one, is one."""
    cuts = ctx.memory.stream_k.array(Int32, plan.STREAM_K_WORDS)
    start = cuts[2]
    if cuts[0] + number == cuts[plan.CUT_WORDS]:
        start = cuts[plan.CUT_WORDS + 2]
    start += plan.OVERHEAD_TILES
    end = start + tiles_of_item(ctx, batch)
    line, groups = cuts[LINE_AT], cuts[GROUPS_AT]
    # Cut c is at c * line // groups, so it is not before y if c >= y * groups / line, rounded up.
    first_cut = ((start + 1) * groups + line - 1) // line
    end_cut = (end * groups + line - 1) // line
    return Parts(cuts[FIRST_AT] + first_cut - 1, end_cut - first_cut + 1)


@cute.jit
def store_stretch(ctx: Context, batch: Batch, number: Int32) -> None:
    """One thread: store a stretch for the consumers, who have read the one before the last."""
    parts = Parts(Int32(0), Int32(1))
    if is_part(ctx, batch):
        parts = parts_of_item(ctx, batch, number)
    smem.store_words(place_of(ctx.memory, number), [ctx.query, ctx.head, parts.first, parts.count])


def place_of(memory: Memory, number: Any) -> Any:
    """Address of a stretch."""
    return memory.stretches.address() + (number & 1) * plan.STRETCH_BYTES


def load_stretch(memory: Memory, number: Any, thread: Any) -> Context:
    """The CTA's stretch of that number, for a consumer's thread; its slots are the gather's."""
    query, head, _, _ = load_words_again(place_of(memory, number))
    return any_stretch(memory, thread)._replace(query=query, head=head)


def any_stretch(memory: Memory, thread: Any) -> Context:
    """A stretch as a thread of a consumer's warpgroup knows each: without its item and slots."""
    none = Int32(0)
    return Context(memory, none, none, none, none, none, none, none, thread, None)


def load_parts(memory: Memory, number: Any) -> Parts:
    """Parts of the item of a stretch."""
    return Parts(*load_words_again(place_of(memory, number))[2:])


LINE_WORDS = 4
"""Words of a thread in a line of a slot: 16 bytes."""
LINE_VALUES = 2 * LINE_WORDS
CONSUMER_THREADS = 2 * WARPGROUP_SIZE


class Workspace(NamedTuple):
    """Device memory of the launches of a stream, or of those that a graph captures."""

    counters: cute.Tensor  # (CTAs,) int32: parts that are stored, by the CTA of an item's first
    slots: cute.Tensor  # (2 CTAs, slot_words) int32


@cute.jit
def slot_of_part(workspace: Workspace, parts: Parts, number: Int32) -> Any:
    """Pointer to the words of a part: the item's first one is its CTA's last stretch, each other
    one its CTA's first."""
    slot = (parts.first + number) * plan.CTA_SLOTS
    if number == 0:
        slot += 1
    return workspace.slots.iterator + Int64(slot) * workspace.slots.shape[1]


def at_line(slot: Any, thread: Any, line: int) -> Any:
    """Pointer to a thread's words of a line; `thread`: of both consumers."""
    return slot + (line * CONSUMER_THREADS + thread) * LINE_WORDS


@cute.jit
def draw_ticket(
    ctx: Context, workspace: Workspace, parts: Parts, number: Int32, consumer: Any
) -> Boolean:
    """All threads of both consumers, which have stored a part: whether all parts are stored, so
    that they merge them. `number`: parts that the CTA has stored before."""
    ticket = ctx.memory.ticket.array(Int32, 1)
    counter = workspace.counters.iterator + parts.first
    ctx.memory.part_stored.arrive()
    if consumer == 0 and ctx.thread == 0:
        # part_stored, a phase a part: all threads have stored theirs, and have read the ticket
        # before. The atomic is a release of that, and an acquire of what CTAs with smaller tickets
        # stored; ticket_full passes it on.
        ctx.memory.part_stored.wait_for(number)
        drawn = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        if drawn == parts.count - 1:
            counter.store(Int32(0))
        ticket[0] = drawn
        ctx.memory.ticket_full.arrive()
    cute.arch.sync_warp()
    ctx.memory.ticket_full.wait_for(number)
    return Boolean(ticket[0] == parts.count - 1)


def load_values(pointer: Any) -> list[Any]:
    """Load four words of a part that another CTA may have stored."""
    return ptx.words("ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", 4, pointer)


def store_values(slot: Any, thread: Any, count: int, value_of: Callable[[int], Any]) -> None:
    """Store a thread's values of a part, in f16. `thread`: of both consumers. `value_of`: the value
    of a number below `count`."""
    for line in range(count // LINE_VALUES):
        of_line = [value_of(LINE_VALUES * line + i) for i in range(LINE_VALUES)]
        words = [pack(of_line[2 * i], of_line[2 * i + 1], F16_KIND) for i in range(LINE_WORDS)]
        gmem.store4(at_line(slot, thread, line), words)


@cute.jit
def add_values(slot: Any, thread: Any, out: cute.Tensor, weights: list[Any]) -> None:
    """Add a thread's values of a part to `out`; `weights`: of the values, one each."""
    for line in cutlass.range_constexpr(cute.size(out) // LINE_VALUES):
        words = load_values(at_line(slot, thread, line))
        for i in cutlass.range_constexpr(LINE_WORDS):
            at = LINE_VALUES * line + 2 * i
            both = from_f16(words[i])
            for odd in cutlass.range_constexpr(2):
                weight = weights[at + odd]
                # 0 times a part without a key may be NaN.
                value = both[odd] if weight != 0.0 else Float32(0.0)
                out[at + odd] = out[at + odd] + weight * value
