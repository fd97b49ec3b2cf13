"""Messages between the CTAs of a cluster; a CTA alone sends none.

Each CTA stages its O and its statistics in its own shared memory. O is divided by the CTA's own
sums and lies in f16, in groups of 8 dims: group by group 16 bytes for each row. A CTA waits until
all others have announced that they read neither keys nor Q any more. It then sends each its dims,
which overwrite the keys, and its statistics, which overwrite Q: two bulk copies.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from flashdsa.dsl.cluster import copy_to_peer, peer_address, store_async
from flashdsa.dsl.fragments import MMA_ROWS
from flashdsa.dsl.integers import divide
from flashdsa.dsl.pipeline import Barriers
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm90.decode.shared.context import Context, Output
from flashdsa.kernels.attention.sm90.decode.shared.plan import (
    CTA_STATISTICS_BYTES,
    GROUP_BYTES,
    MOST_CTAS,
    STATISTICS_BYTES,
)

READY, DONE = range(2)
"""Tokens that a CTA sends the others; each has a barrier and a place."""
TOKEN_BYTES = 4


class Share(NamedTuple):
    """The groups of dims that belong to one CTA."""

    first: Int32
    count: Int32


def share_of(ctx: Context, rank: Any) -> Share:
    """A CTA's share."""
    groups = ctx.plan.dim_groups
    first = divide(rank * groups, ctx.num_ctas)
    return Share(first, divide((rank + 1) * groups, ctx.num_ctas) - first)


def rows_of_item(w: Output) -> Any:
    """Heads of the item that exist, of the plan's."""
    return cutlass.min(Int32(w.lse.shape[1]) - w.ctx.head, Int32(w.ctx.plan.group_heads))


def staged_rows(w: Output) -> Any:
    """Rows that are staged: those of every warp that has any."""
    return divide(rows_of_item(w) + (MMA_ROWS - 1), MMA_ROWS) * MMA_ROWS


def told_of(ctx: Context) -> tuple[Barriers, Barriers]:
    """The barriers of the tokens."""
    return ctx.memory.ready, ctx.memory.done


@cute.jit
def expect_parts(w: Output) -> None:
    """A consumer: tell that no warp of the CTA reads keys or Q any more; the others may send
    theirs."""
    ctx = w.ctx
    if ctx.thread == 0:
        others = ctx.num_ctas - 1
        dims_bytes = share_of(ctx, ctx.rank).count * staged_rows(w) * GROUP_BYTES
        expected = others * (dims_bytes + rows_of_item(w) * STATISTICS_BYTES)
        ctx.memory.o_full.arrive_and_expect_tx(expected)
        for told in told_of(ctx):
            told.arrive_and_expect_tx(others * TOKEN_BYTES)
    cute.arch.sync_warp()
    tell_others(ctx, READY)


@cute.jit
def peer_of_thread(ctx: Context) -> Int32:
    """The CTA that one of the first threads sends to: each CTA begins with the one after it."""
    peer = ctx.rank + ctx.thread
    if peer >= ctx.num_ctas:
        peer -= ctx.num_ctas
    return peer


@cute.jit
def tell_others(ctx: Context, token: cutlass.Constexpr) -> None:
    """Tell every other CTA that all work before the call is done.

    A barrier of the cluster with release semantics would also be a fence of the whole GPU.
    """
    if ctx.thread > 0 and ctx.thread < ctx.num_ctas:
        peer = peer_of_thread(ctx)
        offset = token * MOST_CTAS * TOKEN_BYTES
        to = ctx.memory.tokens.address() + (offset + ctx.rank * TOKEN_BYTES)
        barrier = Int32(told_of(ctx)[token].at().toint())
        store_async(peer_address(to, peer), [ctx.rank], peer_address(barrier, peer))


@cute.jit
def exchange(w: Output, consumer: Int32) -> None:
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
def send_to(w: Output, peer: Int32) -> None:
    """One thread: issue two bulk copies to a CTA."""
    ctx = w.ctx
    share, rows = share_of(ctx, peer), staged_rows(w)
    keys, q = ctx.memory.k.address(), ctx.memory.q.address()
    arrived = peer_address(Int32(ctx.memory.o_full.at().toint()), peer)
    dims_bytes = rows * share.count * GROUP_BYTES
    copy_to_peer(
        peer_address(keys + ctx.rank * dims_bytes, peer),
        keys + (ctx.plan.staged_at + share.first * rows * GROUP_BYTES),
        dims_bytes,
        arrived,
    )
    statistics = q + ctx.rank * CTA_STATISTICS_BYTES
    copy_to_peer(
        peer_address(statistics, peer), statistics, rows_of_item(w) * STATISTICS_BYTES, arrived
    )


@cute.jit
def leave(ctx: Context, consumer: Int32) -> None:
    """Wait until this CTA's messages have arrived, so that it may end."""
    if consumer == 0 and ctx.thread < WARP_SIZE:
        ctx.memory.done.wait(0)


@cute.jit
def address_of_dims(w: Output, rank: Any) -> Any:
    """Address of a CTA's O of this one's dims."""
    ctx = w.ctx
    share, rows = share_of(ctx, ctx.rank), staged_rows(w)
    offset = rank * (share.count * rows * GROUP_BYTES)
    if rank == ctx.rank:
        offset = ctx.plan.staged_at + share.first * rows * GROUP_BYTES
    return ctx.memory.k.address() + offset
