"""Repair of dQ and dW of queries whose group names a key that is not finite: each is computed
alone.

The products are of a group's keys with all its queries, with A = 0 and g = 0 for those that do not
name a key: 0 times NaN, or times infinity, is NaN. It reaches dW of every head of the group, so
that dW says which queries to compute again: those whose own keys are not finite get the same again.

A warp looks at a query, and computes it if need be, in fp32. A lane has DIMS dims.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Vector, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.gmem import store2
from flashdsa.dsl.grids import follow_grid
from flashdsa.dsl.warp import neighbours_sum
from flashdsa.hw import WARP_SIZE
from flashdsa.problem import INDEX_HEAD_DIM

THREADS = 128
WARPS = THREADS // WARP_SIZE
DIMS = INDEX_HEAD_DIM // WARP_SIZE
INFINITY = float("inf")


class Backward(NamedTuple):
    """Inputs and outputs of a backward: dq and dw are written again where a query was reached."""

    q: cute.Tensor  # (S, H, 128) bf16
    k: cute.Tensor  # (S_kv, 128) bf16
    weights: cute.Tensor  # (S, H) fp32
    indices: cute.Tensor  # (S, topk) int32
    grad_scores: cute.Tensor  # (S, topk) fp32
    topk_length: cute.Tensor  # (S,) int32, or (0,): every slot counts
    dq: cute.Tensor  # (S, H, 128) bf16
    dw: cute.Tensor  # (S, H) fp32


@cute.jit
def load_dims(rows: cute.Tensor, row: Int32, lane: Int32) -> Any:
    """This lane's dims of a row of bf16, in fp32."""
    at = rows.iterator + (Int64(row) * INDEX_HEAD_DIM + lane * DIMS)
    words = prims.load_ext(at.to_llvm_ptr(), dtype=Int32, count=DIMS // 2)
    return words.bitcast(BFloat16).to(Float32)


@cute.jit
def was_reached(dw: cute.Tensor, query: Int32, lane: Int32) -> Boolean:
    """Whether dW (S, H) of the query is not finite."""
    reached = Int32(0)
    for head in cutlass.range(lane, dw.shape[1], WARP_SIZE, unroll=1):
        value = dw[query, head]
        if not (value < INFINITY and value > -INFINITY):
            reached = Int32(1)
    return cute.arch.vote_any_sync(reached != 0)


@cute.kernel
def mend_kernel(x: Backward):
    """WARPS queries."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    follow_grid()
    lane = thread % WARP_SIZE
    query = block * WARPS + thread // WARP_SIZE
    if query < x.dw.shape[0]:
        if was_reached(x.dw, query, lane):
            for head in cutlass.range(x.dw.shape[1], unroll=1):
                write_head(x, query, head, lane)


@cute.jit
def write_head(x: Backward, query: Int32, head: Int32, lane: Int32) -> None:
    """Write dQ and dW of a head from the query's own slots that have a gradient."""
    row = query * x.dw.shape[1] + head
    own, weight = load_dims(x.q, row, lane), x.weights[query, head]
    acc = cute.make_rmem_tensor(DIMS, Float32)
    acc.fill(0.0)
    total = Float32(0.0)
    count = Int32(x.indices.shape[1])
    if x.topk_length.shape[0] > 0:
        count = cutlass.min(cutlass.max(x.topk_length[query], Int32(0)), count)
    for slot in cutlass.range(count, unroll=1):
        key, gradient = x.indices[query, slot], x.grad_scores[query, slot]
        if key >= 0 and key < x.k.shape[0] and gradient != 0.0:
            dims = load_dims(x.k, key, lane)
            product = Float32(0.0)
            for i in cutlass.range_constexpr(DIMS):
                product += own[i] * dims[i]
            product = neighbours_sum(product, WARP_SIZE)
            # The gate is shut at 0, and for NaN: as in `gate`.
            gated = gradient if product > 0.0 else Float32(0.0)
            total += gated * product
            for i in cutlass.range_constexpr(DIMS):
                acc[i] = acc[i] + gated * weight * dims[i]
    values = Vector.from_elements([acc[i] for i in range(DIMS)], Float32).to(BFloat16)
    words = values.bitcast(Int32)
    store2(x.dq.iterator + (Int64(row) * INDEX_HEAD_DIM + lane * DIMS), words[0], words[1])
    if lane == 0:
        x.dw[query, head] = total


@cute.jit
def launch_mend(x: Backward, stream: Any):
    """Launch on `stream`, after the backward."""
    mend_kernel(x).launch(
        grid=[(x.dw.shape[0] + WARPS - 1) // WARPS, 1, 1],
        block=[THREADS, 1, 1],
        stream=stream,
        use_pdl=True,
    )
