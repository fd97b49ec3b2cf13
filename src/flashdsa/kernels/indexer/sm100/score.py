"""Scores from products in tensor memory: a thread has a token's product with every head.

score[t] = scale[t] * sum_h weight[h] * relu(sum_d q[h, d] * k[t, d]). Tokens are the rows of the
product and heads its columns, so that the sum over heads stays within a thread.

relu(x) is (x + |x|) / 2, with the half in the scale: both steps are exact, and NaN stays NaN.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute

from flashdsa.dsl import tmem
from flashdsa.dsl.pipeline import RingConsumer
from flashdsa.dsl.smem import VECTOR, load4
from flashdsa.hw import TMEM_LANES, WARP_SIZE, WARPGROUP_SIZE
from flashdsa.kernels.indexer.score_batch import PageScoring, Scoring, doubled_relu
from flashdsa.kernels.indexer.select.lists import PageRange
from flashdsa.kernels.indexer.sm100.plan import GATHERED
from flashdsa.problem import PAGE_SIZE

COLUMNS_AT_ONCE = 32
"""Columns of tensor memory that a thread has in registers."""


class Scorer(NamedTuple):
    """Source of a consumer's products, and its other operands of a score."""

    tmem: Int32  # address of the calling warpgroup's accumulator
    scales: cute.Tensor  # (ring_stages * stage_tokens,) Float32
    score_ring: RingConsumer  # score_full, score_empty: a stage a warpgroup


@cute.jit
def make_scorer(
    address: Int32, scales: cute.Tensor, score_ring: RingConsumer, thread: Int32, plan: Any
) -> Scorer:
    """Return the calling consumer's scorer; `address`: of the allocation."""
    group = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
    return Scorer(address + group * plan.accumulator_columns, scales, score_ring)


def row_of_thread(thread: Int32, plan: Any) -> Int32:
    """The row of a product in the calling thread's lane of tensor memory. 16 of 64 rows are in the
    first lanes of each warp, and nothing in its other lanes."""
    if plan.product_tokens == TMEM_LANES:
        return thread % WARPGROUP_SIZE
    return thread % WARPGROUP_SIZE // WARP_SIZE * (WARP_SIZE // 2) + thread % (WARP_SIZE // 2)


def has_row(thread: Int32, plan: Any) -> cutlass.Boolean:
    """Whether the calling thread's lane has a row of a product."""
    if plan.product_tokens == TMEM_LANES:
        return cutlass.Boolean(True)
    return thread % WARP_SIZE < WARP_SIZE // 2


def prepare(x: Scoring, tile_stage: Int32) -> None:
    """Do nothing: weights are read from shared memory as they are needed."""


@cute.jit
def score_pages(
    x: Scoring, prepared: None, pages: PageRange, store: cutlass.Constexpr, sink: Any
) -> None:
    """Score the calling warpgroup's uses of the ring: those whose number is its own, modulo the
    warpgroups. The pages are whole stages, but for a tile's last one."""
    inputs, scorer, thread, plan = x.inputs, x.scorer, x.thread, x.plan
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
        # issuing warp takes the stages in their order, so that no barrier that it has waited for is
        # a round late.
        scorer.score_ring.wait(scorer.score_ring.state(use))
        # page_full[stage]: TMA has written the scales, the load warp page_valid.
        inputs.page_ring.wait(state._replace(stage=stage))
        tmem.after_sync()
        scored = []
        for product in cutlass.range_constexpr(plan.products_per_stage):
            token = product * plan.product_tokens + row
            scale = scorer.scales[stage * plan.stage_tokens + token] * 0.5
            valid = valid_bit(inputs.page_valid, stage, token, plan)
            total = sum_heads(scorer, product, inputs.weights, weights, thread, plan)
            scored.append((total * scale, valid))
        # All lanes have read tensor memory, scales and page_valid. Four warps make the accumulator
        # and the stage empty.
        tmem.before_sync()
        cute.arch.sync_warp()
        if thread % WARP_SIZE == 0:
            scorer.score_ring.release(group)
            inputs.page_ring.release(stage)
        for product in cutlass.range_constexpr(plan.products_per_stage):
            score, valid = scored[product]
            at = position + product * plan.product_tokens
            store(sink, score, at, valid != 0, has_row(thread, plan) and at < end)
        position += groups * plan.stage_tokens


def valid_bit(valid: cute.Tensor, stage: Int32, token: Int32, plan: Any) -> Int32:
    """Return 0 if that token of the stage is not in the cache."""
    word = stage * plan.valid_words
    if plan.gathers:
        return valid[word + token // GATHERED] & (1 << token % GATHERED)
    return valid[word + token // PAGE_SIZE]


@cute.jit
def sum_heads(
    scorer: Scorer,
    product: cutlass.Constexpr,
    weights: cute.Tensor,
    first_weight: Int32,
    thread: Int32,
    plan: cutlass.Constexpr,
) -> Float32:
    """Return the weighted sum over a row of the stage's product of that number, doubled; all rows
    have one order.

    Args:
        weights: (tile_stages * num_heads,) Float32. first_weight: in steps of VECTOR.
    """
    shares = TMEM_LANES // plan.product_tokens  # lanes of a warp that share a row
    heads = plan.num_heads // shares
    at_once = min(COLUMNS_AT_ONCE, heads)
    if const_expr(shares == 2):
        first_weight += thread % WARP_SIZE // (WARP_SIZE // 2) * (heads // VECTOR)
    own = thread % WARPGROUP_SIZE
    low, high = (Float32(0.0), Float32(0.0)), (Float32(0.0), Float32(0.0))
    for first in cutlass.range_constexpr(0, heads, at_once):
        column = product * plan.num_heads + first
        if const_expr(shares == 2):
            products = tmem.load_half_lanes(scorer.tmem, column, own, at_once, heads)
        else:
            products = tmem.load_lane(scorer.tmem, column, own, at_once)
        for four in cutlass.range_constexpr(at_once // VECTOR):
            weight = load4(weights, first_weight + (first // VECTOR + four))
            relu = [doubled_relu(products[four * VECTOR + i]) for i in range(VECTOR)]
            low = cute.arch.fma_packed_f32x2((relu[0], relu[1]), (weight[0], weight[1]), low)
            high = cute.arch.fma_packed_f32x2((relu[2], relu[3]), (weight[2], weight[3]), high)
    total = (low[0] + low[1]) + (high[0] + high[1])
    if const_expr(shares == 2):
        total += cute.arch.shuffle_sync_bfly(total, WARP_SIZE // 2)
    return total


SCORING = PageScoring(prepare, score_pages)
"""See score_batch.py."""
