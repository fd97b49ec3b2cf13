"""Further dKVs of the chains, which only a launch touches that takes the large groups: they are
zeroed before its first groups and added to dKV behind its last ones, in their order."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.grids import follow_grid
from flashdsa.kernels.attention.choice import FIRST, is_taken

THREADS = 256
QUAD = 4
"""fp32 of one 16-byte access."""
TURNS = 8
"""Quads of a thread."""


@cute.kernel
def zero_kernel(more: cute.Tensor, choice: cute.Tensor):
    """Arguments as in `launch_zero`."""
    follow_grid()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    quads = Int64(more.shape[0]) * more.shape[1] * (more.shape[2] // QUAD)
    nothing = cutlass.Vector.from_elements([Float32(0.0)] * QUAD, Float32)
    if is_taken(choice, Int32(FIRST)):
        for turn in cutlass.range_constexpr(TURNS):
            quad = (Int64(block) * TURNS + turn) * THREADS + thread
            if quad < quads:
                prims.store_ext(nothing, (more.iterator + quad * QUAD).to_llvm_ptr())


@cute.kernel
def merge_kernel(dkv: cute.Tensor, more: cute.Tensor, choice: cute.Tensor):
    """Arguments as in `launch_merge`."""
    follow_grid()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    quads = Int64(dkv.shape[0]) * (dkv.shape[1] // QUAD)
    if is_taken(choice, Int32(FIRST)):
        for turn in cutlass.range_constexpr(TURNS):
            quad = (Int64(block) * TURNS + turn) * THREADS + thread
            if quad < quads:
                own = (dkv.iterator + quad * QUAD).to_llvm_ptr()
                total = prims.load_ext(own, dtype=Float32, count=QUAD)
                for buffer in cutlass.range(more.shape[0], unroll=2):
                    at = more.iterator + (Int64(buffer) * quads + quad) * QUAD
                    total = total + prims.load_ext(at.to_llvm_ptr(), dtype=Float32, count=QUAD)
                prims.store_ext(total, own)


@cute.jit
def ctas_of(quads: Int64) -> Int32:
    """CTAs that take so many quads."""
    return Int32((quads + (THREADS * TURNS - 1)) // (THREADS * TURNS))


@cute.jit
def launch_zero(more: cute.Tensor, choice: cute.Tensor, stream: Any):
    """Launch on `stream`.

    Args:
        more: (buffers - 1, S_kv, d_qk) fp32, written where choice takes the large groups.
        choice: see `kernels.attention.choice`.
    """
    quads = Int64(more.shape[0]) * more.shape[1] * (more.shape[2] // QUAD)
    zero_kernel(more, choice).launch(
        grid=[ctas_of(quads), 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
    )


@cute.jit
def launch_merge(dkv: cute.Tensor, more: cute.Tensor, choice: cute.Tensor, stream: Any):
    """Launch on `stream`.

    Args:
        dkv: (S_kv, d_qk) fp32, added to. more, choice: as in `launch_zero`.
    """
    quads = Int64(dkv.shape[0]) * (dkv.shape[1] // QUAD)
    merge_kernel(dkv, more, choice).launch(
        grid=[ctas_of(quads), 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
    )
