"""delta = sum over dims of O dO: a small kernel before the backward, one warp a head."""

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.grids import follow_grid, launch_ctas, place_in_grid
from flashdsa.hw import WARP_SIZE

THREADS = 256
UNIT = 8
"""bf16 of one 16-byte load."""


def load_unit(tensor: cute.Tensor, row: Int32, unit: Int32) -> Any:
    """8 bf16 as fp32."""
    at = tensor.iterator + Int64(row) * tensor.shape[1] + unit * UNIT
    words = prims.load_ext(at.to_llvm_ptr(), dtype=Int32, count=4)
    return words.bitcast(BFloat16).to(Float32)


@cute.jit
def delta_of(do: cute.Tensor, out: cute.Tensor, row: Int32, lane: Int32) -> Float32:
    """Return delta of a row, in all lanes of a warp."""
    total = Float32(0)
    for step in cutlass.range_constexpr(do.shape[1] // (UNIT * WARP_SIZE)):
        left = load_unit(do, row, step * WARP_SIZE + lane)
        right = load_unit(out, row, step * WARP_SIZE + lane)
        for i in cutlass.range_constexpr(UNIT):
            total += left[i] * right[i]
    for step in cutlass.range_constexpr(5):
        total += cute.arch.shuffle_sync_bfly(total, 1 << step)
    return total


@cute.jit
def write_delta(
    do: cute.Tensor, out: cute.Tensor, delta: cute.Tensor, row: Int32, lane: Int32
) -> None:
    """Write delta of a row; all lanes of a warp call."""
    total = delta_of(do, out, row, lane)
    if lane == 0:
        (delta.iterator + row).store(total)


@cute.jit
def write_deltas(
    do: cute.Tensor,
    out: cute.Tensor,
    delta: cute.Tensor,
    first: Int32,
    count: Int32,
    warps: cutlass.Constexpr,
) -> None:
    """Write delta of `count` rows from `first` on; all threads of a CTA of that many warps call."""
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % WARP_SIZE
    for row in cutlass.range(first + thread // WARP_SIZE, first + count, warps, unroll=1):
        write_delta(do, out, delta, row, lane)


@cute.kernel
def delta_kernel(do: cute.Tensor, out: cute.Tensor, delta: cute.Tensor):
    """do, out: (rows, dims) bf16; delta: rows in all, fp32."""
    follow_grid()
    thread, block, _ = place_in_grid()
    lane = thread % WARP_SIZE
    row = block * (THREADS // WARP_SIZE) + thread // WARP_SIZE
    if row < do.shape[0]:
        write_delta(do, out, delta, row, lane)


@cute.jit
def launch_delta(do: cute.Tensor, out: cute.Tensor, delta: cute.Tensor, stream: Any):
    """Launch on `stream`: do, out (S * H, d_v) bf16 without gaps; delta (S, H) fp32, written."""
    rows_a_cta = THREADS // WARP_SIZE
    made = delta_kernel(do, out, delta)
    launch_ctas(made, (do.shape[0] + rows_a_cta - 1) // rows_a_cta, THREADS, stream, use_pdl=True)
