"""The indexer's scores at given slots, for Hopper: a CTA is a warpgroup with a query of its own.

Nothing but Q is shared: each warp reads its keys from device memory into the registers that wgmma
reads, a tile before the products, and several CTAs of an SM hide each other's waits.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.memory import SmemAllocator

from flashdsa.dsl.arena import ALIGNMENT
from flashdsa.dsl.smem import store_float
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.indexer_training.sm90.scores.plan import FP32, TILE_KEYS
from flashdsa.kernels.indexer_training.sm90.scores.query import QUAD, store_query
from flashdsa.kernels.indexer_training.sm90.scores.tile import (
    WORDS,
    Stretch,
    load_keys,
    multiply,
    read_slots,
    rows_of,
    sum_heads,
    write_scores,
)


@cute.jit
def slots_of(indices: cute.Tensor, topk_length: cute.Tensor, query: Int32) -> Int32:
    """Slots of the query that may be valid."""
    count = Int32(indices.shape[1])
    if topk_length.shape[0] > 0:
        given = (topk_length.iterator + query).load()
        count = cutlass.min(cutlass.max(given, Int32(0)), count)
    return count


@cute.jit
def store_weights(
    weights: cute.Tensor, query: Int32, to: Int32, thread: Int32, num_heads: cutlass.Constexpr
) -> None:
    """All threads: write the query's weights to shared memory, 0 of a head past the last."""
    if thread < num_heads:
        weight = Float32(0.0)
        if thread < weights.shape[1]:
            weight = (weights.iterator + (Int64(query) * weights.shape[1] + thread)).load()
        store_float(to + thread * FP32, weight)


@cute.kernel
def scores_kernel(
    q: cute.Tensor,
    keys: cute.Tensor,
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    weights: cute.Tensor,
    out: cute.Tensor,
    parts: Int32,
    plan: cutlass.Constexpr,
):
    """One CTA; arguments as in `launch_scores`."""
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    shared = Int32(SmemAllocator().allocate(plan.smem_bytes, ALIGNMENT).toint())
    query, part = cta // parts, cta % parts
    ctx = Stretch(indices, keys, query, slots_of(indices, topk_length, query), thread)
    tiles = (ctx.slots + (TILE_KEYS - 1)) // TILE_KEYS
    each = (tiles + parts - 1) // parts
    begin = part * each
    end = cutlass.min(begin + each, tiles)
    first, second = read_slots(ctx, begin), read_slots(ctx, begin + 1)
    words = cute.make_rmem_tensor(WORDS, Int32)
    store_query(q, query, shared, thread, plan.num_heads)
    rows, following = rows_of(ctx, first), second
    load_keys(ctx, rows, words)
    at_weights = shared + plan.query_bytes
    store_weights(weights, query, at_weights, thread, plan.num_heads)
    # Every thread's part of Q is written, and the fence shows it to wgmma.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    own_weights = at_weights + thread % QUAD * (2 * FP32)
    # A value not known to be 0 when this is compiled. wgmma needs words of a thread's two rows
    # alternately; without an instruction between a load and that order ptxas moves what was loaded
    # right after the load, and waits for it at that point.
    zero = Int32(indices.shape[1]) >> 31
    acc = cute.make_rmem_tensor(plan.num_heads // 2, Float32)
    for tile in cutlass.range(begin, end, unroll=1):
        fragments = [words[i] ^ zero for i in range(WORDS)]
        # The next tile's keys take the registers at once, and come during this one's products.
        next_rows = rows_of(ctx, following)
        load_keys(ctx, next_rows, words)
        # ptxas would move the loads after the products but for this.
        cute.arch.sync_warp()
        multiply(acc, fragments, shared, plan.num_heads)
        write_scores(ctx, out, tile, rows, sum_heads(acc, own_weights, plan.num_heads))
        rows, following = next_rows, read_slots(ctx, tile + 2)
    if part == 0:
        line = out.iterator + Int64(query) * indices.shape[1]
        for slot in cutlass.range(
            tiles * TILE_KEYS + thread, indices.shape[1], WARPGROUP_SIZE, unroll=1
        ):
            (line + slot).store(-Float32(float("inf")))


@cute.jit
def launch_scores(
    q: cute.Tensor,
    keys: cute.Tensor,
    indices: cute.Tensor,
    topk_length: cute.Tensor,
    weights: cute.Tensor,
    out: cute.Tensor,
    parts: Int32,
    plan: cutlass.Constexpr,
    stream: Any,
):
    """Launch on `stream`.

    Args:
        q: (S, H, 128) bf16, H at most plan.num_heads. keys: (S_kv, 128) bf16, S_kv at least 1.
        indices: (S, topk) int32. topk_length: (S,) int32, or (0,): every slot counts.
        weights: (S, H) fp32. out: (S, topk) fp32, written.
        parts: CTAs that share a query's slots, at least 1.
    """
    scores_kernel(q, keys, indices, topk_length, weights, out, parts, plan).launch(
        grid=[indices.shape[0] * parts, 1, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=plan.ctas,
        preferred_smem_carveout=plan.carveout,
    )
