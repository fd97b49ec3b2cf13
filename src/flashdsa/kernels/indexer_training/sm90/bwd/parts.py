"""Groups of a last round in parts: as many as keep all SMs busy, and the sum of their dQ and dW.

A launch takes groups in rounds, one for each CTA. The groups that are left over would have an SM
each while the others wait. Each part of a group has some of its tiles and writes dQ and dW in fp32,
which are added in the parts' order.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Vector, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.gmem import store2
from flashdsa.dsl.grids import follow_grid, launch_ctas, place_in_grid
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.attention.choice import is_taken
from flashdsa.kernels.indexer_training.sm90.bwd import plan as sizes
from flashdsa.problem import INDEX_HEAD_DIM

THREADS = 256
DIMS = INDEX_HEAD_DIM // WARP_SIZE
"""Dims of a lane."""


class Parts(NamedTuple):
    """Groups from `whole` on are in `count` parts each; `plan.rows` rows of a part follow those of
    the part before."""

    whole: Int32
    count: Int32
    dq: cute.Tensor  # (parts * rows, 128) fp32
    dw: cute.Tensor  # (parts * rows,) fp32


@cute.jit
def choose_parts(groups: Int32, num_ctas: Int32, capacity: Int32) -> tuple[Int32, Int32]:
    """(groups that are not in parts, parts of each of the others): those with which the last
    rounds end first, if lists are full. `num_ctas`: that run at once. `capacity`: entries of a
    list."""
    rest = groups % num_ctas
    tiles = capacity // sizes.TILE_KEYS
    whole, best, count = groups, tiles + sizes.PART_TILES, Int32(1)
    for parts in cutlass.range_constexpr(2, sizes.MOST_PARTS_OF_GROUP + 1):
        rounds = (rest * parts + (num_ctas - 1)) // num_ctas
        time = rounds * ((tiles + (parts - 1)) // parts + sizes.PART_TILES)
        if rest > 0 and rest * parts <= sizes.MOST_PARTS and time < best:
            whole, best, count = groups - rest, time, Int32(parts)
    return whole, count


@cute.kernel
def sum_kernel(
    parts: Parts,
    dq: cute.Tensor,
    dw: cute.Tensor,
    choice: cute.Tensor,
    number: Int32,
    plan: cutlass.Constexpr,
):
    """A row of dQ a warp; arguments as in `launch_sum`."""
    thread, block, _ = place_in_grid()
    follow_grid()
    lane = thread % WARP_SIZE
    row = block * (THREADS // WARP_SIZE) + thread // WARP_SIZE
    group, of_group = row // plan.rows, row % plan.rows
    to = parts.whole * plan.rows + row
    if to < dq.shape[0] and is_taken(choice, number):
        sums = cute.make_rmem_tensor(DIMS, Float32)
        sums.fill(0.0)
        total = Float32(0.0)
        for part in cutlass.range(parts.count, unroll=4):
            line = Int64(group * parts.count + part) * plan.rows + of_group
            at = parts.dq.iterator + (line * INDEX_HEAD_DIM + lane * DIMS)
            values = prims.load_ext(at.to_llvm_ptr(), dtype=Float32, count=DIMS)
            for i in cutlass.range_constexpr(DIMS):
                sums[i] = sums[i] + values[i]
            total += (parts.dw.iterator + line).load()
        words = Vector.from_elements([sums[i] for i in range(DIMS)], Float32).to(BFloat16)
        words = words.bitcast(Int32)
        store2(dq.iterator + (Int64(to) * INDEX_HEAD_DIM + lane * DIMS), words[0], words[1])
        if lane == 0:
            (dw.iterator + to).store(total)


@cute.jit
def launch_sum(
    parts: Parts, groups: Int32, dq: cute.Tensor, dw: cute.Tensor, choice: cute.Tensor,
    number: Int32, plan: cutlass.Constexpr, stream: Any,
):  # fmt: skip
    """Launch on `stream`, after the backward, if any groups are in parts.

    Args:
        dq: (S * H, 128) bf16 and dw (S * H,) fp32: rows of those groups are written.
        choice, number: as in `is_taken`.
    """
    rows = (groups - parts.whole) * plan.rows
    if rows > 0:
        made = sum_kernel(parts, dq, dw, choice, number, plan)
        launch_ctas(made, rows * WARP_SIZE // THREADS, THREADS, stream, use_pdl=True)
