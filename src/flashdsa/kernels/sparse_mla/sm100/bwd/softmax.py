"""Role softmax: thread = lane = head. Completes P and dP with the peer's dims; S and dS from them.

 of block b:  P -> peer | + peer's P -> S | dP -> peer | S to shared memory | + peer's dP -> dS
Both CTAs add the same two numbers, so S and dS are the same bits in both.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Vector, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.cluster import peer_address, store_async
from flashdsa.dsl.pipeline import arrive_at_peer, wait_at_cluster_scope
from flashdsa.dsl.smem import load_words, store_words
from flashdsa.dsl.swizzle import swizzled_64, swizzled_128
from flashdsa.kernels.sparse_mla.sm100.bwd.context import (
    Context,
    arrive_after_tmem,
    barrier_at,
    lanes_at,
    load_lane,
    shared_at,
    wait_for_mma,
)
from flashdsa.kernels.sparse_mla.sm100.bwd.plan import B_TOPK

LOG2_E = 1.4426950408889634
WORDS = 4
"""32-bit words of one 16-byte move."""


class Softmax(NamedTuple):
    """Reads p and dp, writes s, ds and the peer's partial; signals p_free, s_ready, ds_ready."""

    c: Context
    scale: Float32  # sm_scale
    lse: Float32  # of this thread's head, natural; +inf: no valid slot
    delta: Float32  # likewise, sum over dims of O dO


@cute.jit
def send(c: Context, own: Any, exchange: cutlass.Constexpr[int]) -> None:
    """This thread's 32 partial sums to the peer.

    Args:
        exchange: 0: P, 1: dP, the two of a block; so the phases' parities are constants.
    """
    peer = c.rank ^ 1
    # partial_free: the peer has read the exchange before; before the first it passes.
    wait_at_cluster_scope(barrier_at(c, "partial_free"), Int32(1 - exchange))
    full = barrier_at(c, "partial_full")
    if c.thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(full, c.plan.partial_bytes)
    at = peer_address(shared_at(c, "partial"), peer)
    barrier = peer_address(full.toint(), peer)
    words = own.bitcast(Int32)
    for unit in cutlass.range_constexpr(B_TOPK // WORDS):
        store_async(
            at + swizzled_128(c.thread, unit),
            [words[WORDS * unit + i] for i in range(WORDS)],
            barrier,
        )


@cute.jit
def receive(c: Context, own: Any, exchange: cutlass.Constexpr[int]) -> Any:
    """The sums of both CTAs; then the peer may send again."""
    wait_at_cluster_scope(barrier_at(c, "partial_full"), Int32(exchange))
    sums = []
    for unit in cutlass.range_constexpr(B_TOPK // WORDS):
        got = load_words(shared_at(c, "partial") + swizzled_128(c.thread, unit), Float32)
        sums += [own[WORDS * unit + i] + got[i] for i in range(WORDS)]
    arrive_at_peer(barrier_at(c, "partial_free"), c.rank ^ 1)
    return sums


@cute.jit
def valid_keys(c: Context, block: Int32) -> Any:
    """Bit k: key k of the block is valid."""
    place = block % c.plan.index_stages
    cute.arch.mbarrier_wait(barrier_at(c, "rows_full", place), (block // c.plan.index_stages) & 1)
    rows = cute.recast_ptr(c.arena + c.plan.smem.offset("rows"), dtype=Int32)
    row = (rows + place * B_TOPK + c.thread % 32).load()
    valid = cute.arch.vote_ballot_sync(row >= 0)
    if c.thread % 32 == 0:
        cute.arch.mbarrier_arrive(barrier_at(c, "rows_free", place))
    return Int32(valid)


def stage(c: Context, name: str, words: Any) -> None:
    """A head's row of 32 keys in bf16 to shared memory; the MMA reads it there."""
    at = shared_at(c, name)
    for unit in range(B_TOPK // (2 * WORDS)):
        row = [words[WORDS * unit + i] for i in range(WORDS)]
        store_words(at + swizzled_64(c.thread, unit), row)
    # generic writes above -> tcgen05.mma reads through the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")


def packed(values: Any) -> Any:
    """fp32 values as bf16, two a word."""
    return Vector.from_elements(values, Float32).to(BFloat16).bitcast(Int32)


@cute.jit
def softmax_block(r: Softmax, block: Int32) -> None:
    """S and dS of one block."""
    c = r.c
    parity = block & 1
    wait_for_mma(barrier_at(c, "p_ready"), parity)
    own = load_lane(c, "p", B_TOPK)
    arrive_after_tmem(barrier_at(c, "p_free"))
    send(c, own, 0)
    sums = receive(c, own, 0)
    valid = valid_keys(c, block)
    log2_sum = r.lse * Float32(LOG2_E)
    scale = r.scale * Float32(LOG2_E)
    s = []
    for key in cutlass.range_constexpr(B_TOPK):
        exponent = sums[key] * scale - log2_sum
        if (valid >> key) & 1 == 0:
            exponent = -Float32.inf
        s.append(cute.math.exp2(exponent, fastmath=True))

    wait_for_mma(barrier_at(c, "dp_ready"), parity)
    own = load_lane(c, "dp", B_TOPK)
    send(c, own, 1)
    # s_ds_free: the block before's dKV has read s and ds.
    cute.arch.mbarrier_wait(barrier_at(c, "s_ds_free"), (block - 1) & 1)
    stage(c, "s", packed(s))
    cute.arch.mbarrier_arrive(barrier_at(c, "s_ready"))

    sums = receive(c, own, 1)
    ds = packed([s[key] * (sums[key] - r.delta) * r.scale for key in range(B_TOPK)])
    stage(c, "ds", ds)
    # dp_ready said that dQ of the block before has read these columns; other edges came since.
    prims.tcgen05_fence("after_thread_sync")
    prims.tcgen05_st("32x32b", lanes_at(c, "ds", Int32), ds)
    prims.tcgen05_wait("store")
    arrive_after_tmem(barrier_at(c, "ds_ready"))


@cute.jit
def softmax_all(r: Softmax) -> None:
    """Every block of the query."""
    for block in cutlass.range(r.c.num_blocks, unroll=1):
        softmax_block(r, block)
