"""Scores from products in tensor memory: a thread has a token's product with every head.

score[t] = scale[t] * sum_h weight[h] * relu(sum_d q[h, d] * k[t, d]). Tokens are the rows of the
product and heads its columns, so that the sum over heads stays within a thread.

relu(x) is (x + |x|) / 2, with the half in the scale: both steps are exact, and NaN stays NaN.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute
from cutlass.experimental import primitives as prims

from flashdsa.dsl.pipeline import RingConsumer
from flashdsa.dsl.smem import VECTOR, load4
from flashdsa.hw import TMEM_LANES, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.relu import doubled_relu
from flashdsa.kernels.indexer.score_batch import PageScoring
from flashdsa.kernels.indexer.select.list_scores import PageRange
from flashdsa.kernels.indexer.sm100.plan import IndexerPlan
from flashdsa.kernels.indexer.smem_views import InputBuffers
from flashdsa.problem import PAGE_SIZE

COLUMNS_AT_ONCE = 32
"""Of tensor memory in registers."""
LANE_SHIFT = 16
"""Of the lane in an address of tensor memory."""


class Scorer(NamedTuple):
    """Where a consumer finds products and what else a score needs."""

    tmem: Int32  # address of this warp's lanes of its warpgroup's accumulator
    scales: cute.Tensor  # (ring_stages * stage_tokens,) Float32
    score_ring: RingConsumer  # score_full, score_empty: a stage a warpgroup


@cute.jit
def make_scorer(
    tmem: Int32, scales: cute.Tensor, score_ring: RingConsumer, thread: Int32, plan: Any
) -> Scorer:
    """Of the calling consumer; `tmem`: the address of the allocation."""
    group = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
    warp = cute.arch.make_warp_uniform(thread % WARPGROUP_SIZE // WARP_SIZE)
    lanes = (warp * WARP_SIZE) << LANE_SHIFT
    return Scorer(tmem + group * plan.accumulator_columns + lanes, scales, score_ring)


def row_of_thread(thread: Int32, plan: Any) -> Int32:
    """The row of a product in the calling thread's lane of tensor memory. Of 64 rows 16 are in
    the first lanes of each warp, and nothing in its others."""
    if plan.product_tokens == TMEM_LANES:
        return thread % WARPGROUP_SIZE
    return thread % WARPGROUP_SIZE // WARP_SIZE * (WARP_SIZE // 2) + thread % (WARP_SIZE // 2)


def has_row(thread: Int32, plan: Any) -> cutlass.Boolean:
    """Whether there is one."""
    if plan.product_tokens == TMEM_LANES:
        return cutlass.Boolean(True)
    return thread % WARP_SIZE < WARP_SIZE // 2


def prepare(
    inputs: InputBuffers, scorer: Scorer, tile_stage: Int32, thread: Int32, plan: IndexerPlan
) -> None:
    """Nothing: weights are read from shared memory as they are needed."""


@cute.jit
def score_pages(
    inputs: InputBuffers,
    scorer: Scorer,
    prepared: None,
    pages: PageRange,
    thread: Int32,
    store: cutlass.Constexpr,
    sink: Any,
    plan: cutlass.Constexpr,
) -> None:
    """Score the calling warpgroup's uses of the ring: those whose number is its own, modulo the
    warpgroups. The pages are whole stages, but for a tile's last one."""
    groups, of_stage = plan.consumer_warpgroups, plan.pages_per_stage
    group = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
    first_use = (pages.first_number + pages.begin) // of_stage
    skipped = (group - first_use) & (groups - 1)
    end_use = first_use + (pages.end - pages.begin + of_stage - 1) // of_stage
    row = row_of_thread(thread, plan)
    position = (pages.first_page + pages.begin + skipped * of_stage) * PAGE_SIZE + row
    end = (pages.first_page + pages.end) * PAGE_SIZE
    weights = pages.tile_stage * (plan.num_heads // VECTOR)
    for use in cutlass.range(first_use + skipped, end_use, groups, unroll=1):
        state = inputs.page_ring.state(use)
        stage = cute.arch.make_warp_uniform(state.stage)
        # score_full[warpgroup]: the products are in tensor memory, and have read the keys. The
        # issuing warp takes the stages in their order, so that no barrier that it has waited for
        # is a round behind.
        scorer.score_ring.wait(scorer.score_ring.state(use))
        # page_full[stage]: TMA has written the scales, the load warp page_valid.
        inputs.page_ring.wait(state._replace(stage=stage))
        prims.tcgen05_fence("after_thread_sync")
        scored = []
        for product in cutlass.range_constexpr(plan.products_per_stage):
            token = product * plan.product_tokens + row
            scale = scorer.scales[stage * plan.stage_tokens + token] * 0.5
            valid = inputs.page_valid[stage * of_stage + token // PAGE_SIZE]
            column = scorer.tmem + product * plan.num_heads
            total = sum_heads(column, inputs.weights, weights, thread % WARP_SIZE, plan)
            scored.append((total * scale, valid))
        # All lanes have read tensor memory, scales and page_valid. Four warps make the accumulator
        # and the stage empty.
        prims.tcgen05_fence("before_thread_sync")
        cute.arch.sync_warp()
        if thread % WARP_SIZE == 0:
            scorer.score_ring.release(group)
            inputs.page_ring.release(stage)
        for product in cutlass.range_constexpr(plan.products_per_stage):
            score, valid = scored[product]
            at = position + product * plan.product_tokens
            store(sink, score, at, valid != 0, has_row(thread, plan) and at < end)
        position += groups * plan.stage_tokens


@cute.jit
def sum_heads(
    column: Int32, weights: cute.Tensor, first_weight: Int32, lane: Int32, plan: cutlass.Constexpr
) -> Float32:
    """The weighted sum over a row's columns from `column` on, doubled, in one order for all rows.

    Args:
        weights: (..,) Float32. first_weight: four times as many before the first one.
    """
    if const_expr(plan.product_tokens == TMEM_LANES):
        return add_columns("32x32b", column, plan.num_heads, weights, first_weight)
    # Two lanes share a row: each sums half of the heads.
    heads = plan.num_heads // 2
    half = lane // (WARP_SIZE // 2) * (heads // VECTOR)
    total = add_columns("16x32bx2", column, heads, weights, first_weight + half)
    return total + cute.arch.shuffle_sync_bfly(total, WARP_SIZE // 2)


@cute.jit
def add_columns(
    shape: cutlass.Constexpr,
    column: Int32,
    heads: cutlass.Constexpr,
    weights: cute.Tensor,
    first_weight: Int32,
) -> Float32:
    """The sum over this lane's columns, `heads` of them."""
    at_once = min(COLUMNS_AT_ONCE, heads)
    low, high = (Float32(0.0), Float32(0.0)), (Float32(0.0), Float32(0.0))
    for first in cutlass.range_constexpr(0, heads, at_once):
        pointer = prims.make_tmem_ptr(column + first, Float32)
        # The second 16 lanes of 16x32bx2 read `heads` columns further on.
        offset = {} if const_expr(shape == "32x32b") else {"offset": heads}
        products = prims.tcgen05_ld(shape, pointer, num=at_once, **offset)
        prims.tcgen05_wait("load")
        for four in cutlass.range_constexpr(at_once // VECTOR):
            weight = load4(weights, first_weight + (first // VECTOR + four))
            relu = [doubled_relu(products[four * VECTOR + i]) for i in range(VECTOR)]
            low = cute.arch.fma_packed_f32x2((relu[0], relu[1]), (weight[0], weight[1]), low)
            high = cute.arch.fma_packed_f32x2((relu[2], relu[3]), (weight[2], weight[3]), high)
    return (low[0] + low[1]) + (high[0] + high[1])


SCORING = PageScoring(prepare, score_pages)
"""See score_batch.py."""
