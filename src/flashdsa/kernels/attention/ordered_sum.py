"""dKV from a row for each slot: the rows of a key are added one after another, in slots' order.

Float additions do not commute with rounding; the same order every time gives the same bits.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int64, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.grids import launch_ctas, place_in_grid

UNIT = 4
"""fp32 of one 16-byte load, and of one thread."""
AHEAD = 8
"""Loads that a thread may have in flight."""


@cute.kernel
def ordered_sum_kernel(
    slots: cute.Tensor, order: cute.Tensor, starts: cute.Tensor, dkv: cute.Tensor
):
    """Add up a key in each CTA, four dims a thread; arguments as in `launch_ordered_sum`."""
    thread, key, _ = place_in_grid()
    width, dim = dkv.shape[1], thread * UNIT
    first, last = starts[key], starts[key + 1]
    if first < last:
        at = (dkv.iterator + Int64(key) * width + dim).to_llvm_ptr()
        total = prims.load_ext(at, dtype=Float32, count=UNIT)
        for place in cutlass.range(first, last, unroll=AHEAD):
            row = slots.iterator + Int64(order[place]) * width + dim
            total = total + prims.load_ext(row.to_llvm_ptr(), dtype=Float32, count=UNIT)
        prims.store_ext(total, at)


@cute.jit
def launch_ordered_sum(
    stream: Any, slots: cute.Tensor, order: cute.Tensor, starts: cute.Tensor, dkv: cute.Tensor
):
    """Launch on `stream`. `slots`: (slots, dims) fp32. `order`: (slots,) int32, numbers of slots,
    those of a key together. `starts`: (keys + 1,) int32: key k has order[starts[k]:starts[k + 1]].
    `dkv`: (keys, dims) fp32, added to."""
    made = ordered_sum_kernel(slots, order, starts, dkv)
    launch_ctas(made, dkv.shape[0], dkv.shape[1] // UNIT, stream)
