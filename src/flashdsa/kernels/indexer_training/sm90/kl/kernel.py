"""A row's divergence, or its gradient, by a warp that goes over the row twice.

The first pass finds the row's largest score, the sum of the exponentials against it and the sum of
the target. The second one computes each slot's term, or gradient, from small differences, so that
nothing cancels that does not cancel in the result.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from flashdsa.dsl.compile_options import compile_launch
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.dsl.grids import launch_ctas, place_in_grid
from flashdsa.dsl.warp import neighbours_sum
from flashdsa.hw import SM90, WARP_SIZE
from flashdsa.kernels.indexer_training.sm90.kl.plan import KlPlan

THREADS = 256
AT_ONCE = 8
"""Slots of a lane that are read together."""
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
TARGET_SCALE = 2.0**24
"""Scale of targets, which cancels: the least fp32 number becomes a normal one, with a logarithm."""
LEAST = -3.0e38
"""The largest score of a row without a valid slot."""


class Row(NamedTuple):
    """A row, as this lane reads it: slots lane, lane + 32, ..."""

    scores: Any  # pointers
    target: Any
    topk: Int32
    lane: Int32


class Sums(NamedTuple):
    """Values of the first pass that the second one needs."""

    largest: Float32  # score
    exponentials: Float32  # sum of exp(score - largest)
    target: Float32  # sum
    counts: Boolean  # whether the row has a valid slot and a target


@cute.jit
def read_slot(row: Row, slot: Int32) -> tuple[Float32, Float32, Boolean]:
    """Score and scaled target of a slot, and whether it is valid; the target is 0 where not."""
    score, target = Float32(-float("inf")), Float32(0.0)
    if slot < row.topk:
        score = (row.scores + slot).load()
        target = (row.target + slot).load()
    valid = score != -float("inf")
    target = target * Float32(TARGET_SCALE) if valid else Float32(0.0)
    return score, target, valid


def exponential(value: Any) -> Any:
    """e^value."""
    return cute.math.exp2(value * Float32(LOG2_E), fastmath=True)


def logarithm(value: Any) -> Any:
    """The natural one."""
    return cute.math.log2(value, fastmath=True) * Float32(LN_2)


@cute.jit
def sum_up(row: Row) -> Sums:
    """Take the first pass; all lanes call, and get the same result."""
    largest, exponentials, total = Float32(LEAST), Float32(0.0), Float32(0.0)
    for start in cutlass.range(row.lane, row.topk, AT_ONCE * WARP_SIZE, unroll=1):
        slots = [read_slot(row, start + i * WARP_SIZE) for i in range(AT_ONCE)]
        top = largest
        for score, _, _ in slots:
            top = cute.arch.fmax(top, score)
        exponentials = exponentials * exponential(largest - top)
        for score, target, _ in slots:
            exponentials += exponential(score - top)
            total += target
        largest = top
    top = largest
    for step in cutlass.range_constexpr(WARP_SIZE.bit_length() - 1):
        top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1 << step))
    exponentials = neighbours_sum(exponentials * exponential(largest - top), WARP_SIZE)
    total = neighbours_sum(total, WARP_SIZE)
    return Sums(top, exponentials, total, (exponentials > 0.0) & (total > 0.0))


@cute.jit
def divergence(row: Row, sums: Sums) -> Float32:
    """sum p (log p - log pi); all lanes call, and get the same result."""
    total = Float32(0.0)
    inverse = Float32(1.0) / sums.target
    # log p - log pi = log P - (score - largest) - log(sum P / sum of the exponentials)
    shift = logarithm(sums.target) - logarithm(sums.exponentials)
    for start in cutlass.range(row.lane, row.topk, AT_ONCE * WARP_SIZE, unroll=1):
        slots = [read_slot(row, start + i * WARP_SIZE) for i in range(AT_ONCE)]
        for score, target, _ in slots:
            term = target * inverse * (logarithm(target) - (score - sums.largest) - shift)
            total += term if target > 0.0 else Float32(0.0)
    return neighbours_sum(total, WARP_SIZE)


@cute.jit
def write_gradient(row: Row, sums: Sums, weight: Float32, out: Any) -> None:
    """Write weight (pi - p) of each slot; 0 where it is not valid, and of a row that does not
    count."""
    of_target, of_scores = Float32(1.0) / sums.target, Float32(1.0) / sums.exponentials
    for start in cutlass.range(row.lane, row.topk, AT_ONCE * WARP_SIZE, unroll=1):
        slots = [read_slot(row, start + i * WARP_SIZE) for i in range(AT_ONCE)]
        for i in cutlass.range_constexpr(AT_ONCE):
            score, target, valid = slots[i]
            pi = exponential(score - sums.largest) * of_scores
            gradient = weight * (pi - target * of_target)
            if start + i * WARP_SIZE < row.topk:
                gradient = gradient if valid & sums.counts else Float32(0.0)
                (out + (start + i * WARP_SIZE)).store(gradient)


@cute.kernel
def kl_kernel(
    scores: cute.Tensor,
    target: cute.Tensor,
    grad_kl: Any,
    out: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """One CTA of the grid; arguments as in `launch_kl`."""
    thread, cta, _ = place_in_grid()
    number = cta * (THREADS // WARP_SIZE) + thread // WARP_SIZE
    if number < scores.shape[0]:
        topk = Int32(scores.shape[1])
        first = Int64(number) * topk
        row = Row(scores.iterator + first, target.iterator + first, topk, thread % WARP_SIZE)
        sums = sum_up(row)
        if cutlass.const_expr(plan.gradient):
            write_gradient(row, sums, grad_kl[number], out.iterator + first)
        else:
            kl = Float32(0.0)
            if sums.counts:
                kl = divergence(row, sums)
            if row.lane == 0:
                out[number] = kl


@cute.jit
def launch_kl(
    plan: cutlass.Constexpr, stream: Any, scores: cute.Tensor, target: cute.Tensor, *rest: Any
):
    """Write the divergences of `target` (S, topk) from the softmax of `scores` (S, topk), all fp32,
    S at least 1, on `stream`; or their gradients in the scores.

    Args:
        rest: out (S,), written; of the gradient grad_kl (S,), by which each row's is multiplied,
            and out (S, topk), written.
    """
    ctas = (scores.shape[0] * WARP_SIZE + THREADS - 1) // THREADS
    grad_kl = rest[0] if plan.gradient else None
    launch_ctas(kl_kernel(scores, target, grad_kl, rest[-1], plan), ctas, THREADS, stream)


def compile_kl(plan: KlPlan) -> Any:
    """Compile `launch_kl`."""
    rows, topk = cute.sym_int32(), cute.sym_int32()
    matrix, vector = fake_tensor(Float32, (rows, topk), 4), fake_tensor(Float32, (rows,), 4)
    rest = [vector, matrix] if plan.gradient else [vector]
    return compile_launch(SM90, launch_kl, plan, matrix, matrix, *rest)
