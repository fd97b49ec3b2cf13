"""d_sink = -sum over queries of exp(sink - lse') delta, lse' = log(exp(lse) + exp(sink)).

A CTA has eight heads and all queries, so that each sum has one order: of a thread's queries, of the
lanes of a warp, of the warps. It reads 64 bytes a query, little beside the backward itself.
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int64, cute

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.dsl.fragments import exp2
from flashdsa.dsl.grids import follow_grid, launch_ctas, place_in_grid
from flashdsa.hw import SM90, WARP_SIZE
from flashdsa.kernels.attention.sm90.core.softmax import LOG2_E

THREADS = 1024
HEADS = 8
"""Heads of a CTA: a warp reads whole sectors of 32 bytes of four rows."""
AT_ONCE = 8
"""Queries of a thread that are read together."""
ROWS = THREADS // HEADS
"""Queries that a CTA reads at a time."""
WARPS = THREADS // WARP_SIZE


def is_infinite(value: Any) -> Boolean:
    """Whether it is +inf or -inf."""
    return (value == Float32(float("inf"))) | (value == Float32(-float("inf")))


@cute.jit
def term(lse: Float32, sink: Float32, delta: Float32) -> Float32:
    """exp(sink - lse') delta; 0 for a query without a valid key and for an infinite sink, whose
    delta is 0 and whose share may be inf / inf."""
    share = Float32(1.0) / (Float32(1.0) + exp2((lse - sink) * Float32(LOG2_E)))
    nothing = (lse == Float32(float("inf"))) | is_infinite(sink)
    return Float32(0.0) if nothing else share * delta


@cute.kernel
def sink_kernel(lse: cute.Tensor, sink: cute.Tensor, delta: cute.Tensor, d_sink: cute.Tensor):
    """Eight heads; arguments as in `launch_sink`."""
    follow_grid()
    thread, block, _ = place_in_grid()
    warp, lane = thread // WARP_SIZE, thread % WARP_SIZE
    sums = cutlass.memory.SmemAllocator().allocate_array(Float32, WARPS * HEADS)
    queries, heads = lse.shape
    head = block * HEADS + thread % HEADS
    total = Float32(0.0)
    if head < heads:
        own = (sink.iterator + head).load()
        for first in cutlass.range(thread // HEADS, queries, AT_ONCE * ROWS, unroll=1):
            # Of a query past the last one: no valid key.
            of_rows = [Float32(float("inf")) for _ in range(AT_ONCE)]
            deltas = [Float32(0.0) for _ in range(AT_ONCE)]
            for i in cutlass.range_constexpr(AT_ONCE):
                if first + i * ROWS < queries:
                    at = Int64(first + i * ROWS) * heads + head
                    of_rows[i] = (lse.iterator + at).load()
                    deltas[i] = (delta.iterator + at).load()
            for i in cutlass.range_constexpr(AT_ONCE):
                total += term(of_rows[i], own, deltas[i])
    for step in (HEADS, 2 * HEADS):
        total += cute.arch.shuffle_sync_bfly(total, step)
    if lane < HEADS:
        (sums + (warp * HEADS + lane)).store(total)
    cute.arch.sync_threads()
    # Every warp has written its sums of the eight heads.
    if thread < HEADS and head < heads:
        total = Float32(0.0)
        for other in cutlass.range_constexpr(WARPS):
            total += (sums + (other * HEADS + thread)).load()
        (d_sink.iterator + head).store(-total)


@cute.jit
def launch_sink(
    stream: Any, lse: cute.Tensor, sink: cute.Tensor, delta: cute.Tensor, d_sink: cute.Tensor
):
    """Launch on `stream`. `lse`: (S, H) fp32, natural, without sinks. `sink`: (H,) fp32. `delta`:
    (S, H) fp32. `d_sink`: (H,) fp32, written."""
    made = sink_kernel(lse, sink, delta, d_sink)
    launch_ctas(made, (lse.shape[1] + HEADS - 1) // HEADS, THREADS, stream, use_pdl=True)


def compile_sink(plan: Any) -> Any:
    """Compile `launch_sink`."""
    del plan
    queries, heads = cute.sym_int32(), cute.sym_int32()
    of_queries = fake_tensor(Float32, (queries, heads), 4)
    of_heads = fake_tensor(Float32, (heads,), 4)
    return compile_launch(SM90, launch_sink, None, of_queries, of_heads, of_queries, of_heads)
