"""The end of an item: each CTA of its cluster adds up a share of the dims of all their O.

Each CTA stages its O and its statistics in its own shared memory. O is divided by the CTA's own
sums and lies in f16, in groups of 8 dims: group by group 16 bytes for each row. A CTA waits until
all others have announced that they read neither keys nor Q any more. It then sends each its dims,
which overwrite the keys, and its statistics, which overwrite Q: two bulk copies. A
CTA alone sends none.

A warp has eight rows: it finds the maximum of each of them, adds the CTAs' parts in the CTAs'
order, each times its weight, and writes its share of the results.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from flashdsa.dsl import integers, pipeline, ptx, smem
from flashdsa.dsl.cluster import copy_to_peer, peer_address, store_async
from flashdsa.dsl.fragments import MMA_ROWS, exp2, pack, row_of_thread
from flashdsa.hw import WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.core.results import ItemRows, ask_sink, factor_and_lse
from flashdsa.kernels.attention.sm90.core.softmax import LEAST
from flashdsa.kernels.attention.sm90.decode.shared import context, plan
from flashdsa.kernels.attention.sm90.decode.shared.words import from_f16, load_float

READY, DONE = range(2)
"""Tokens that a CTA sends the others; each has a barrier and a place."""
TOKEN_BYTES = 4


class Share(NamedTuple):
    """The groups of dims that belong to one CTA."""

    first: Int32
    count: Int32


def share_of(ctx: context.Context, rank: Any) -> Share:
    """A CTA's share."""
    groups = ctx.plan.dim_groups
    first = integers.divide(rank * groups, ctx.num_ctas)
    return Share(first, integers.divide((rank + 1) * groups, ctx.num_ctas) - first)


def rows_of_item(w: context.Output) -> Any:
    """Heads of the item that exist, of the plan's."""
    return cutlass.min(Int32(w.lse.shape[1]) - w.ctx.head, Int32(w.ctx.plan.group_heads))


def staged_rows(w: context.Output) -> Any:
    """Rows that are staged: those of every warp that has any."""
    return integers.divide(rows_of_item(w) + (MMA_ROWS - 1), MMA_ROWS) * MMA_ROWS


def told_of(ctx: context.Context) -> tuple[pipeline.Barriers, pipeline.Barriers]:
    """The barriers of the tokens."""
    return ctx.memory.ready, ctx.memory.done


@cute.jit
def expect_parts(w: context.Output) -> None:
    """A consumer: no warp of the CTA reads keys or Q any more; the others may send theirs."""
    ctx = w.ctx
    if ctx.thread == 0:
        others = ctx.num_ctas - 1
        dims_bytes = share_of(ctx, ctx.rank).count * staged_rows(w) * plan.GROUP_BYTES
        expected = others * (dims_bytes + rows_of_item(w) * plan.STATISTICS_BYTES)
        ctx.memory.o_full.arrive_and_expect_tx(expected)
        for told in told_of(ctx):
            told.arrive_and_expect_tx(others * TOKEN_BYTES)
    cute.arch.sync_warp()
    tell_others(ctx, READY)


@cute.jit
def peer_of_thread(ctx: context.Context) -> Int32:
    """The CTA that one of the first threads sends to: each CTA begins with the one after it."""
    peer = ctx.rank + ctx.thread
    if peer >= ctx.num_ctas:
        peer -= ctx.num_ctas
    return peer


@cute.jit
def tell_others(ctx: context.Context, token: cutlass.Constexpr) -> None:
    """Tell every other CTA that all work before the call is done. A barrier of the cluster with
    release semantics would also be a fence of the whole GPU."""
    if ctx.thread > 0 and ctx.thread < ctx.num_ctas:
        peer = peer_of_thread(ctx)
        offset = token * plan.MOST_CTAS * TOKEN_BYTES
        to = ctx.memory.tokens.address() + (offset + ctx.rank * TOKEN_BYTES)
        barrier = Int32(told_of(ctx)[token].at().toint())
        store_async(peer_address(to, peer), [ctx.rank], peer_address(barrier, peer))


@cute.jit
def exchange(w: context.Output, consumer: Int32) -> None:
    """Send the staged O, by a thread for each other CTA, and receive that of all others."""
    ctx = w.ctx
    if consumer == 0 and ctx.thread < WARP_SIZE:
        # ready: no other CTA reads keys, which O overwrites, or Q any more.
        ctx.memory.ready.wait(0)
        if ctx.thread > 0 and ctx.thread < ctx.num_ctas:
            send_to(w, peer_of_thread(ctx))
        cute.arch.sync_warp()
    # o_full: all other CTAs' dims and statistics have come.
    ctx.memory.o_full.wait(0)
    if consumer == 0:
        tell_others(ctx, DONE)


@cute.jit
def send_to(w: context.Output, peer: Int32) -> None:
    """One thread: issue two bulk copies to a CTA."""
    ctx = w.ctx
    share, rows = share_of(ctx, peer), staged_rows(w)
    keys, q = ctx.memory.k.address(), ctx.memory.q.address()
    arrived = peer_address(Int32(ctx.memory.o_full.at().toint()), peer)
    dims_bytes = rows * share.count * plan.GROUP_BYTES
    copy_to_peer(
        peer_address(keys + ctx.rank * dims_bytes, peer),
        keys + (ctx.plan.staged_at + share.first * rows * plan.GROUP_BYTES),
        dims_bytes,
        arrived,
    )
    statistics = q + ctx.rank * plan.CTA_STATISTICS_BYTES
    copy_to_peer(
        peer_address(statistics, peer), statistics, rows_of_item(w) * plan.STATISTICS_BYTES, arrived
    )


@cute.jit
def leave(ctx: context.Context, consumer: Int32) -> None:
    """Wait until this CTA's messages have arrived, so that it may end."""
    if consumer == 0 and ctx.thread < WARP_SIZE:
        ctx.memory.done.wait(0)


@cute.jit
def address_of_dims(w: context.Output, rank: Any) -> Any:
    """Address of a CTA's O of this one's dims."""
    ctx = w.ctx
    share, rows = share_of(ctx, ctx.rank), staged_rows(w)
    offset = rank * (share.count * rows * plan.GROUP_BYTES)
    if rank == ctx.rank:
        offset = ctx.plan.staged_at + share.first * rows * plan.GROUP_BYTES
    return ctx.memory.k.address() + offset


WARP_ROWS = 8
LANES_A_ROW = WARP_SIZE // WARP_ROWS
WARPS = 2 * WARPGROUP_SIZE // WARP_SIZE
"""Warps of both consumers."""
AT_ONCE = 2
"""Groups that a lane adds up together."""
WORDS = plan.GROUP_BYTES // 4
"""Words of a group."""


class Place(NamedTuple):
    """A lane's part of the CTA's share: a row, and every so many groups of dims of it."""

    row: Int32
    number: Int32  # of its first group
    stride: Int32  # from a group to its next one


@cute.jit
def write_share(w: context.Output, consumer: Int32) -> None:
    """Both consumers, one code: write their part of the CTA's share of the results."""
    ctx = w.ctx
    # staged: both halves of this CTA's O are staged.
    context.meet_consumers(ctx.memory.staged)
    if context.takes_part(ctx):
        place = place_of_lane(w, ctx.thread + consumer * WARPGROUP_SIZE)
        exists = place.row < rows_of_item(w)
        asked = ask_sink(w.attn_sink, ctx.head + place.row, exists)
        if ctx.num_ctas > 1:
            exchange(w, consumer)
        top = top_of_row(w, place.row)
        if exists:
            add_up(w, place, top, asked)
        if ctx.num_ctas > 1:
            leave(ctx, consumer)


@cute.jit
def place_of_lane(w: context.Output, thread: Int32) -> Place:
    """The part of a thread of both consumers. Eight lanes have eight rows, four have neighbouring
    groups of a row; warps share eight rows if there are fewer such than warps."""
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    # Warps that have rows of their own: two for 16 rows, four for 32, all for 48 and 64.
    log2 = cutlass.min(staged_rows(w) // (2 * WARP_ROWS), Int32(WARPS.bit_length() - 1))
    return Place(
        (warp & ((1 << log2) - 1)) * WARP_ROWS + lane % WARP_ROWS,
        (warp >> log2) * LANES_A_ROW + lane // WARP_ROWS,
        (WARPS * LANES_A_ROW) >> log2,
    )


@cute.jit
def top_of_row(w: context.Output, row: Int32) -> Float32:
    """The largest of the CTAs' maxima of a row, to all four lanes of a warp that have it."""
    ctx = w.ctx
    number = cute.arch.lane_idx() // WARP_ROWS
    top = Float32(LEAST)
    if row < rows_of_item(w):
        base = ctx.memory.q.address() + row * plan.STATISTICS_BYTES
        for rank in cutlass.range(number, ctx.num_ctas, LANES_A_ROW, unroll=1):
            top = cute.arch.fmax(top, load_float(base + rank * plan.CTA_STATISTICS_BYTES))
    for offset in (WARP_ROWS, 2 * WARP_ROWS):
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset))
    return top


def rows_of_thread(w: context.Output) -> ItemRows:
    """The thread's rows of an item that no other CTA shares."""
    row = row_of_thread(w.ctx.thread)
    return ItemRows(first_row(w), rows_of_item(w), w.ctx.head + row, row)


@cute.jit
def add_up(w: context.Output, place: Place, top: Float32, asked: Int32) -> None:
    """Add up a lane's groups of a row: the CTAs' O times their weights; the first CTA writes lse.
    `top`: the largest of the CTAs' maxima."""
    i, share = place.number, share_of(w.ctx, w.ctx.rank)
    while i < share.count:
        add_groups(w, share, place, i, top, asked)
        i += AT_ONCE * place.stride


@cute.jit
def add_groups(
    w: context.Output, share: Share, place: Place, first: Int32, top: Float32, asked: Int32
) -> None:
    """Add up groups `first`, `first` + stride, ... of this CTA's dims of a row, as far as they
    exist. A CTA's words are loaded while those of the one before are added."""
    ctx = w.ctx
    half_groups = ctx.plan.dim_groups // 2
    # A group that does not exist is read as the last one.
    groups = [cutlass.min(first + n * place.stride, share.count - 1) for n in range(AT_ONCE)]
    is_high = [share.first + group >= half_groups for group in groups]
    sums = [Float32(0.0) for _ in range(AT_ONCE * plan.GROUP_DIMS)]
    total = Float32(0.0)
    statistics, units = load_part(w, place.row, groups, Int32(0))
    for rank in cutlass.range(ctx.num_ctas, unroll=1):
        following = cutlass.min(rank + 1, ctx.num_ctas - 1)
        next_statistics, next_units = load_part(w, place.row, groups, following)
        weight = statistics[1] * exp2((statistics[0] - top) * w.scale.factor)
        total += weight
        low, high = weight * statistics[2], weight * statistics[3]
        for n in cutlass.range_constexpr(AT_ONCE):
            factor = high if is_high[n] else low
            for word in cutlass.range_constexpr(WORDS):
                # 0 times what a part without a key sends may be NaN.
                values = from_f16(units[WORDS * n + word] if factor != 0.0 else Int32(0))
                for d in cutlass.range_constexpr(2):
                    i = n * plan.GROUP_DIMS + 2 * word + d
                    sums[i] = sums[i] + factor * values[d]
        statistics, units = next_statistics, next_units
    factor, lse = factor_and_lse(w.attn_sink, asked, top * w.scale.factor, total)
    if ctx.rank == 0 and first == 0:
        (w.lse.iterator + (first_row(w) + place.row)).store(lse)
    for n in cutlass.range_constexpr(AT_ONCE):
        of_group = [
            value * factor for value in sums[n * plan.GROUP_DIMS : (n + 1) * plan.GROUP_DIMS]
        ]
        words = [pack(of_group[2 * j], of_group[2 * j + 1]) for j in range(plan.GROUP_DIMS // 2)]
        if factor == 0.0:
            words = [Int32(0) for _ in range(plan.GROUP_DIMS // 2)]
        group = share.first + groups[n]
        to = w.out.iterator + (
            (first_row(w) + place.row) * ctx.plan.tile.d_v + group * plan.GROUP_DIMS
        )
        if first + n * place.stride < share.count:
            ptx.run("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", to, *words)


@cute.jit
def load_part(
    w: context.Output, row: Int32, groups: list[Int32], rank: Int32
) -> tuple[list[Float32], list[Int32]]:
    """Load a CTA's statistics of a row, and its O of some groups of this CTA's dims."""
    base = address_of_dims(w, rank) + row * plan.GROUP_BYTES
    group_bytes = staged_rows(w) * plan.GROUP_BYTES
    units = []
    for group in groups:
        unit = smem.load_words(base + group * group_bytes, Int32)
        units += [unit[word] for word in range(WORDS)]
    at = w.ctx.memory.q.address() + (rank * plan.CTA_STATISTICS_BYTES + row * plan.STATISTICS_BYTES)
    words = smem.load_words(at, Float32)
    return [words[i] for i in range(plan.STATISTICS)], units


def first_row(w: context.Output) -> Any:
    """Number of the item's first row over queries and heads."""
    return Int64(w.ctx.query) * Int32(w.lse.shape[1]) + w.ctx.head
