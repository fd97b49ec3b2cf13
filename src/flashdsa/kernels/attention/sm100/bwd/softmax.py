"""Role softmax: thread = lane = head. S and dS from P and dP of both CTAs' dims; dQ's way out.

 of block b:  P -> peer | + peer's P -> S | dP -> peer | S to shared memory | + peer's dP -> dS
Both CTAs add the same two numbers, so S and dS are the same bits in both.

At the end of an item dQ goes from TMEM to global memory, 32 bytes of a row at a time a thread. No
part of it passes through shared memory, into which the next item's Q and dO come meanwhile.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Vector, cute

from flashdsa.dsl import cluster, gmem, memory, pipeline, tmem
from flashdsa.dsl.smem import VECTOR, load_words, store_words
from flashdsa.dsl.swizzle import swizzled_64, swizzled_128
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.sm100.bwd.load import Context, load_lane, store_lane
from flashdsa.kernels.attention.sm100.core.tile import PAIR_ROWS

LOG2_E = 1.4426950408889634


class Softmax(NamedTuple):
    """Reads p and dp, writes s, ds and the peer's partial; signals p_free, s_ready, ds_ready."""

    ctx: Context
    scale: Float32  # sm_scale
    lse: Float32  # of this thread's head, natural; +inf: no valid slot
    delta: Float32  # likewise, sum over dims of O dO


@cute.jit
def send(ctx: Context, own: Any, number: Int32) -> None:
    """Send this thread's 32 partial sums to the peer. `number`: of the exchange, over all items:
    two a block, P's and then dP's."""
    peer = ctx.cta_rank ^ 1
    # partial_free of the exchange before, by the peer's threads at cluster scope: they have read
    # what came then, so its memory may be written again. The wait passes for the first exchange.
    ctx.memory.partial_free.wait_round(number - 1)
    full = ctx.memory.partial_full
    if ctx.thread == 0:
        full.arrive_and_expect_tx()
    at = cluster.peer_address(ctx.memory.partial.address(), peer)
    barrier = cluster.peer_address(full.at().toint(), peer)
    words = own.bitcast(Int32)
    for unit in cutlass.range_constexpr(ctx.plan.tile.keys // VECTOR):
        cluster.store_async(
            at + swizzled_128(ctx.thread, unit),
            [words[VECTOR * unit + i] for i in range(VECTOR)],
            barrier,
        )


@cute.jit
def receive(ctx: Context, own: Any, number: Int32) -> Any:
    """Return the sums of both CTAs; then the peer may send again. Arguments as in `send`."""
    # partial_full of this exchange, by the bytes of the peer's st.async: they may be read until
    # partial_free tells the peer.
    ctx.memory.partial_full.wait_round(number)
    sums = []
    for unit in cutlass.range_constexpr(ctx.plan.tile.keys // VECTOR):
        got = load_words(ctx.memory.partial.address() + swizzled_128(ctx.thread, unit), Float32)
        sums += [own[VECTOR * unit + i] + got[i] for i in range(VECTOR)]
    # The peer may write again only to this CTA's shared memory: nothing else is released.
    ctx.memory.partial_free.arrive_at_peer_for_shared(ctx.cta_rank ^ 1)
    return sums


@cute.jit
def valid_keys(ctx: Context, number: Int32) -> Any:
    """Bit k: key k of the block of that running number is valid for this thread's query."""
    ring = pipeline.RingConsumer(ctx.memory.rows_full, ctx.memory.rows_free)
    at = ring.state(number)
    # rows_full: the load warp has stored the block's numbers and masks; they stay until rows_free.
    ring.wait(at)
    if cutlass.const_expr(ctx.plan.group > 1):
        query = ctx.thread // ctx.plan.group_heads
        masks = ctx.memory.masks.pointer(Int32)
        valid = (masks + at.stage * ctx.plan.mask_words + query).load()
        cute.arch.sync_warp()
    else:
        rows = ctx.memory.rows.pointer(Int32)
        row = (rows + at.stage * ctx.plan.tile.keys + ctx.thread % WARP_SIZE).load()
        valid = cute.arch.vote_ballot_sync(row >= 0)
    if ctx.thread % WARP_SIZE == 0:
        ring.release(at.stage)
    return Int32(valid)


def store_row(ctx: Context, matrix: memory.Region, words: Any) -> None:
    """Store a head's row of 32 keys in bf16 to shared memory, from which the MMA reads it."""
    for unit in range(ctx.plan.tile.keys // (2 * VECTOR)):
        row = [words[VECTOR * unit + i] for i in range(VECTOR)]
        store_words(matrix.address() + swizzled_64(ctx.thread, unit), row)
    # generic writes above -> tcgen05.mma reads through the async proxy
    cute.arch.fence_proxy("async.shared", space="cta")


def packed(values: Any) -> Any:
    """fp32 values as bf16, two a word."""
    return Vector.from_elements(values, Float32).to(BFloat16).bitcast(Int32)


@cute.jit
def zero_unless(condition: cutlass.Boolean, words: Any, count: cutlass.Constexpr[int]) -> Any:
    """Return the first words if the condition holds, else zeros, whatever they are. O and dO of a
    query without valid slots may hold anything, and S = 0 times NaN is NaN."""
    kept = []
    for i in cutlass.range_constexpr(count):
        word = Int32(words[i])
        if not condition:
            word = Int32(0)
        kept.append(word)
    return Vector.from_elements(kept, Int32)


@cute.jit
def exponentials(role: Softmax, logits: Any, valid: Int32, keys: cutlass.Constexpr[int]) -> Any:
    """S of this thread's head; 0 where a key's bit of `valid` is."""
    log2_sum = role.lse * Float32(LOG2_E)
    scale = role.scale * Float32(LOG2_E)
    s = []
    for key in cutlass.range_constexpr(keys):
        exponent = logits[key] * scale - log2_sum
        if (valid >> key) & 1 == 0:
            exponent = -Float32.inf
        s.append(cute.math.exp2(exponent, fastmath=True))
    return s


@cute.jit
def softmax_block(role: Softmax, number: Int32) -> None:
    """Compute S and dS of the block of that running number."""
    ctx = role.ctx
    p_number, dp_number = 2 * number, 2 * number + 1
    # p_ready of this block: the MMAs of P are done; its columns may be read until p_free.
    tmem.wait_then_tcgen05(ctx.memory.p_ready, number)
    own = load_lane(ctx, "p", ctx.plan.tile.keys)
    tmem.arrive_after_tcgen05(ctx.memory.p_free)
    send(ctx, own, p_number)
    sums = receive(ctx, own, p_number)
    valid = valid_keys(ctx, number)
    s = exponentials(role, sums, valid, ctx.plan.tile.keys)

    # dp_ready of this block: the MMAs of dP are done; they came after dQ of the block before, so
    # the columns, dS's too, belong to this role until ds_ready.
    tmem.wait_then_tcgen05(ctx.memory.dp_ready, number)
    own = load_lane(ctx, "dp", ctx.plan.tile.keys)
    send(ctx, own, dp_number)
    # s_ds_free of the block before: its dKV, the last reader of s and ds in shared memory, is done.
    ctx.memory.s_ds_free.wait_round(number - 1)
    store_row(ctx, ctx.memory.s, packed(s))
    ctx.memory.s_ready.arrive()

    sums = receive(ctx, own, dp_number)
    keys = range(ctx.plan.tile.keys)
    ds = packed([s[key] * (sums[key] - role.delta) * role.scale for key in keys])
    ds = zero_unless(valid != 0, ds, ctx.plan.tile.keys // 2)
    store_row(ctx, ctx.memory.ds, ds)
    # Other waits followed dp_ready's, which says that these columns may be written.
    tmem.after_sync()
    store_lane(ctx, "ds", ds)
    tmem.wait_stored()
    tmem.arrive_after_tcgen05(ctx.memory.ds_ready)


@cute.jit
def softmax_item(role: Softmax) -> None:
    """Take every block of an item."""
    for block in cutlass.range(role.ctx.num_blocks, unroll=1):
        softmax_block(role, role.ctx.number(block))


COLUMNS = 32
"""Columns that are read at once: fp32, which become 16 words of bf16."""
WORDS = 8
"""Words of a store, a whole sector of the second-level cache."""


class DqWriter(NamedTuple):
    """Reads dq and dq_rope once dq_ready says that every MMA of dQ is done."""

    ctx: Context
    dq: Any  # (S * H, 576) bf16, device memory


@cute.jit
def write_columns(
    role: DqWriter, region: cutlass.Constexpr[str], first: cutlass.Constexpr[int], dim: Int32
) -> None:
    """Write COLUMNS columns of a region, from `first` on, to the row's dims from `dim` on."""
    ctx = role.ctx
    words = load_lane(ctx, region, COLUMNS, first).to(BFloat16).bitcast(Int32)
    row = Int64(ctx.item) * PAIR_ROWS + ctx.thread
    at = role.dq.iterator + row * ctx.plan.tile.d_qk + dim
    # The last group has no rows after its last query.
    if row < role.dq.shape[0]:
        for word in cutlass.range_constexpr(0, COLUMNS // 2, WORDS):
            gmem.store8(at + 2 * word, [words[word + i] for i in range(WORDS)])


@cute.jit
def write_dq(role: DqWriter) -> None:
    """Write all of a row's dims of this CTA."""
    ctx, tile = role.ctx, role.ctx.plan.tile
    # dq_ready, of this item: its last MMA of dQ is done, so dQ may be read until ds_ready of the
    # next item's first block.
    tmem.wait_then_tcgen05(ctx.memory.dq_ready, ctx.turn.items_before)
    for first in cutlass.range_constexpr(0, tile.dims, COLUMNS):
        write_columns(role, "dq", first, ctx.cta_rank * tile.dims + first)
    for first in cutlass.range_constexpr(0, tile.own_rope_dims, COLUMNS):
        write_columns(role, "dq_rope", first, tile.d_v + ctx.cta_rank * tile.own_rope_dims + first)
